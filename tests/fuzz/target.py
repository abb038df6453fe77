"""Fuzz targets with their corpus, a scratch folder, an event loop, and checks of error messages."""

import asyncio
import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hypothesis.strategies import SearchStrategy, composite

from llama_adapter.runtime.text import UNSAFE_ON_TERMINALS
from tests.fuzz.mutators import Mutator, one_of

CORPUS = Path(__file__).with_name("corpus")  # inputs that have revealed a bug, by target
MAX_BYTES = 2**18  # of an input
MAX_MESSAGE_CHARS = 4_000
_QUOTED = re.compile(r"`[^`]*`|'[^']*'|\"[^\"]*\"|\([^)]*\)")
_NUMBER = re.compile(r"[-+]?\d[\d.,e+-]*")


@dataclass(frozen=True)
class Target:
    """One reader under test.

    `run` takes one input and returns its outcome as a short text: "ok ...", or the documented refusal. Everything else
    makes it raise an exception, which is a finding. `seeds` are named good inputs. `mutate` knows the format.
    """

    name: str
    run: Callable[[bytes], str]
    seeds: Callable[[], Mapping[str, bytes]]
    mutate: Mutator

    def corpus(self) -> Mapping[str, bytes]:
        """Seeds and earlier findings, by name."""
        files = sorted(CORPUS.glob(f"{self.name}/*"))
        return {**self.seeds(), **{path.name: path.read_bytes() for path in files}}

    def changed(self, good: Sequence[bytes]) -> SearchStrategy[bytes]:
        """One of the inputs with changes; half of the time, one of the last 20."""
        several = (good, good[-20:])
        return composite(lambda draw: self.mutate(draw, one_of(draw, one_of(draw, several)))[:MAX_BYTES])()


@cache
def scratch() -> Path:
    """A folder of this process for input files, in shared memory if possible."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="llama-adapter-fuzz-", dir=place))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """One event loop for all inputs of this process."""
    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    return loop


def written(name: str, data: bytes) -> Path:
    """Write the data to the scratch file with this name, which may be in a folder; returns its path."""
    path = scratch() / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def new_folder(name: str) -> Path:
    """An empty scratch folder with this name."""
    folder = scratch() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def refused(error: BaseException, *, is_shown: bool = True) -> str:
    """The outcome of a documented error, after checks of its message.

    If `is_shown`, the message goes to a terminal unchanged, so it must not contain control sequences.
    """
    message = str(getattr(error, "message", None) or error)
    assert message, f"{type(error).__name__} without a message"
    assert len(message) <= MAX_MESSAGE_CHARS, f"a message of {len(message):,} characters: {message[:200]!r}"
    if is_shown:
        assert not UNSAFE_ON_TERMINALS.search(message), f"unsafe on a terminal: {message[:500]!r}"
    code = getattr(error, "code", "")
    return f"{type(error).__name__} {code} {shape_of(message)}"


def shape_of(message: str) -> str:
    """A message without quoted text and numbers, so that refusals can be compared."""
    return _NUMBER.sub("0", _QUOTED.sub("_", message))[:120]
