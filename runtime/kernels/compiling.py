"""Compiles the kernels with the machine's C compiler, once, into the user's cache. This file imports no torch.

The name of a library ends with a digest of its content, so a damaged library is detected before it is loaded. Loading a
truncated library would end the process.
"""

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from llama_adapter.runtime.kernels.instruction_sets import InstructionSet
from llama_adapter.runtime.partial import named_after, partial_folder
from llama_adapter.runtime.user_cache import read_own, working_cache

FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden")
LIBRARIES = ("-lm",)
FOLDER = Path(__file__).parent
SOURCES = sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".c", ".h"))
ZIGLANG = (sys.executable, "-m", "ziglang", "cc")  # the Clang of the package ziglang

_COMPILE_SECONDS = 300
_LEAST_FREE_BYTES = 2**23  # for a library of 0.3 MB and the compiler's own files


def compilers() -> Iterator[list[str]]:
    """Commands of C compilers, best first; only `$CC` if it is set."""
    if command := os.environ.get("CC"):
        try:
            yield shlex.split(command)
        except ValueError:  # an unclosed quotation
            yield [command]
        return
    for name in ("gcc", "clang", "cc"):
        if found := shutil.which(name):
            yield [found]
    if importlib.util.find_spec("ziglang") is not None:
        yield list(ZIGLANG)


def compiled(compiler: list[str], instructions: InstructionSet, extras: Collection[str] | None = None) -> Path:
    """Path of the library in the user's cache, with all optional flags or `extras`; raises OSError or SubprocessError.

    It is compiled if it is missing or damaged, or if another user could have written it.
    """
    command = [*compiler, *FLAGS, *instructions.options(instructions.extras() if extras is None else extras)]
    # Systems with different C libraries may share a home folder.
    stem = f"kernels-{digest_of_sources(' '.join(command), platform.machine(), *platform.libc_ver())}"
    cache = working_cache()
    for path in cache.glob(f"{stem}-*.so"):
        with suppress(OSError):
            if path.name == name_by_content(read_own(path), stem):
                return path
    for place in (cache, tempfile.gettempdir()):  # a compiler would fail, be asked again with fewer flags, and the next
        if shutil.disk_usage(place).free < _LEAST_FREE_BYTES:
            raise OSError(f"the disk of `{place}` is full")
    with named_after(cache / stem), partial_folder(cache / stem) as folder:
        folder.chmod(0o700)
        made = folder / "kernels.so"
        compile_kernels(command, made)
        made.chmod(0o600)
        target = cache / name_by_content(read_own(made), stem)
        return made.replace(target)  # atomic: other processes may compile the same


def name_by_content(data: bytes, stem: str) -> str:
    """The name of a library with this content: `stem` and 16 hexadecimal digits."""
    return f"{stem}-{hashlib.sha256(data).hexdigest()[:16]}.so"


def compile_kernels(command: list[str], target: Path) -> None:
    """Compile the library `target` with `command`, a compiler and its options; raises OSError or SubprocessError."""
    subprocess.run(
        [*command, str(FOLDER / "kernels.c"), "-o", str(target), *LIBRARIES],
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        errors="replace",
        timeout=_COMPILE_SECONDS,
    )


def digest_of_sources(*marks: str) -> str:
    """16 hexadecimal digits for the content of the sources and `marks`; raises OSError if a source is missing."""
    digest = hashlib.sha256("\n".join(marks).encode())
    for name in SOURCES:
        digest.update((FOLDER / name).read_bytes())
    return digest.hexdigest()[:16]


def said(error: Exception) -> str:
    """One line that describes a failure, taken from the compiler's output if there is any."""
    own = str(error)
    if isinstance(error, subprocess.SubprocessError):
        own = own.rpartition("' ")[2]  # without the command
    told = getattr(error, "stderr", None) or own
    text = told.decode(errors="replace") if isinstance(told, bytes) else told  # bytes after a timeout
    lines = text.strip().splitlines()
    return next((line for line in lines if "error" in line), (*lines, "?")[0]).strip()
