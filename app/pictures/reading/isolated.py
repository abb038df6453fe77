"""Reads pictures in separate processes that can be killed, so that no file can hang or end the calling process."""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Self

from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.reading.prefetch import num_reading_threads
from llama_adapter.app.pictures.reading.process import KeepWaiting, ReadingProcess
from llama_adapter.app.pictures.reading.process_pool import ReadingCrew
from llama_adapter.app.pictures.reading.reader import (
    CRASHED,
    TIMEOUT,
    PictureReader,
    PictureReading,
    Reader,
)
from llama_adapter.app.pictures.reading.sources import FileSlice, Source
from llama_adapter.app.pictures.reading.spec import DEFAULT_PICTURE_TIMEOUT_S, ReaderKind, ReadingSpec
from llama_adapter.runtime.text import shown_name
from llama_adapter.vision.pixels import PixelRule

# Address space for one picture, in addition to the process itself. The largest allowed picture takes 2 GiB (128 million
# floats).
DEFAULT_MEMORY_BYTES = 4 * 2**30


class IsolatedReader(ReadingCrew):
    """Reads exactly as `PictureReader`, but in `num_processes` processes (default: one per reading thread).

    `num_kept` of them (default: all) are kept ready; the others start on demand. A picture that is not read within
    `timeout_s` seconds gets the error `timeout`. A picture that ends its process gets `crashed`, and one that needs
    more than `memory_bytes` gets `crashed` or `too_large`. The process is then replaced. None means no limit. An opened
    PIL image is read in the calling thread, without these limits. Thread-safe. However this process ends, the reading
    processes end with it.
    """

    def __init__(
        self,
        spec: ReadingSpec,
        *,
        pixels: PixelRule,
        timeout_s: float | None,
        num_processes: int | None = None,
        num_kept: int | None = None,
        memory_bytes: int | None = DEFAULT_MEMORY_BYTES,
    ) -> None:
        if timeout_s is not None and not 0 < timeout_s < float("inf"):
            raise ValueError(f"timeout_s must be a number of seconds above 0, got {timeout_s}")
        self._timeout_s = timeout_s
        self._here = PictureReader(spec, pixels=pixels)
        super().__init__(
            lambda: ReadingProcess(spec, pixels=pixels, memory_bytes=memory_bytes),
            num_processes=num_processes or num_reading_threads(),
            num_kept=num_kept,
        )

    def wait_until_ready(self) -> None:
        """Wait until a process is ready to read. Raises `ReadingProcessError` if none can be started."""
        with self.lent():
            pass

    def read(
        self,
        source: Source,
        *,
        name: str | None = None,
        wants_pixels: Callable[[str], bool] | None = None,
        side: int | None = None,
        keep_waiting: KeepWaiting | None = None,
    ) -> PictureReading:
        """As `Reader.read`. Raises `ReadingProcessError` if no process can be started, RuntimeError after closing.

        The time of `wants_pixels` does not count. `keep_waiting` is called 20 times a second during a reading, with the
        process and the processor seconds used so far. An exception that it raises ends the reading and is raised here.
        """
        if isinstance(source, os.PathLike):
            source = os.fsdecode(source)
        if not isinstance(source, str | bytes | FileSlice):
            return self._here.read(source, name=name, wants_pixels=wants_pixels, side=side)
        attempt = partial(self._attempt, source, name=name, side=side, keep_waiting=keep_waiting)
        reading, may_be_innocent = attempt(wants_pixels=wants_pixels)
        if may_be_innocent:
            # If the digest is known, `wants_pixels` has returned True.
            reading, _ = attempt(wants_pixels=None if reading.digest else wants_pixels)
        return reading

    def _attempt(
        self,
        source: str | bytes | FileSlice,
        *,
        name: str | None,
        wants_pixels: Callable[[str], bool] | None,
        side: int | None,
        keep_waiting: KeepWaiting | None,
    ) -> tuple[PictureReading, bool]:
        """Read once; returns the reading, and whether another attempt may succeed.

        Another attempt may succeed if the process ended before it replied about this picture, or if it was ended by
        SIGKILL. No decoder sends SIGKILL, but the system may kill any process when memory is short.
        """
        started = time.perf_counter()
        process: ReadingProcess | None = None
        was_killed = False
        try:
            with self.lent() as process:
                reading = process.read(
                    source,
                    name=name,
                    wants_pixels=wants_pixels,
                    side=side,
                    timeout_s=self._timeout_s,
                    keep_waiting=keep_waiting,
                )
                return reading, False
        except TimeoutError:
            is_at_hand = isinstance(source, bytes) or (process is not None and bool(process.digest))
            code, reason = TIMEOUT, f"it was not {_AFTER_TIMEOUT[is_at_hand].format(self._timeout_s)}"
        except ConnectionError:
            self.check_open()
            assert process is not None, "only a process that was lent hangs up"
            code, reason = CRASHED, f"the process that read it ended {_how_ended(process)}"
            was_killed = process.how_it_ended() == _KILLED
        except ChildProcessError as error:
            code, reason = CRASHED, f"the process that read it sent a malformed reply ({error}); {_AFTER_CRASH}"
        reading = PictureReading(
            digest="" if process is None else process.digest,
            pixels=None,
            error=AnswerError(code=code, message=f"Wanted to read {_shown(source, name)}, but {reason}."),
            elapsed_ms=(time.perf_counter() - started) * 1e3,
        )
        return reading, code == CRASHED and (was_killed or not reading.digest)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_KILLED = "by SIGKILL"
_AFTER_TIMEOUT = {
    True: "decoded after {:g} s; make it smaller, save it again with another program, or allow more time",
    False: "read and decoded after {:g} s; check its disk or network, make it smaller, or allow more time",
}
_AFTER_CRASH = "it is damaged or hostile: save it again with another program, or leave it out"


def _how_ended(process: ReadingProcess) -> str:
    how = process.how_it_ended()
    if how == _KILLED:
        return f"{how}: the system may have run out of memory; make the picture smaller, or run fewer programs"
    said = f" ({process.child.said})" if process.child.said else ""
    return f"{how}{said}; {_AFTER_CRASH}"


def _shown(source: str | bytes | FileSlice, name: str | None) -> str:
    if isinstance(source, FileSlice):
        where = f"`{shown_name(source.path)}`"
        return f"`{shown_name(name)}`" if name else f"the picture at byte {source.offset:,} of {where}"
    if isinstance(source, str):
        return f"`{shown_name(source)}`"
    return f"`{shown_name(name)}`" if name else "the given bytes"


def open_reader(
    kind: ReaderKind,
    spec: ReadingSpec,
    *,
    pixels: PixelRule,
    timeout_s: float = DEFAULT_PICTURE_TIMEOUT_S,
    device: str = "cpu",
) -> Reader:
    """Open the reader of a command's pictures, for an encoder that takes `pixels`, while `device` computes.

    It starts a process; several pictures at a time start more.
    """
    if kind == "thread":
        return PictureReader(spec, pixels=pixels)
    num_processes = num_reading_threads(device)
    reader = IsolatedReader(spec, pixels=pixels, timeout_s=timeout_s, num_processes=num_processes, num_kept=1)
    reader.start()
    return reader
