"""The kernels as a shared library: compiled once with the machine's C compiler, kept, loaded and declared to ctypes.

Nothing here is needed: without a compiler, or on another processor, torch's own kernels compute.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llama_adapter.runtime.kernels.scratch import in_scratch

SOURCES = ("kernels.c", "decoder.h", "encoder.h", "linear.h", "vector.h", "parallel.h")
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-shared", "-fvisibility=hidden")
NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512dq")  # as Linux names what a processor can do
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # of weights; enum in linear.h

_COMPILE_SECONDS = 300
_Function = Any  # of a library: ctypes has no public name for its type


class Library:
    """The loaded kernels. Raises OSError when `path` is not the library of these sources."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        i32, i64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
        self._kinds = _function(loaded, "kernels_kinds", i32)
        self.packed_bytes = _function(loaded, "kernels_packed_bytes", i64, i32, i64, i64)
        self.pack = _function(loaded, "kernels_pack", None, i32, i64, i64, pointer, pointer, i32)
        scratch = (pointer, i64)
        self.linear = in_scratch(
            _function(loaded, "kernels_linear", i64, pointer, pointer, i32, i64, pointer, i32, *scratch)
        )
        self.blocks = in_scratch(_function(loaded, "kernels_blocks", i64, pointer, pointer, i64, i64, i32, *scratch))
        self.forward = in_scratch(_function(loaded, "kernels_forward", i64, pointer, pointer, i32, *scratch))

    @property
    def types(self) -> tuple[str, ...]:
        """Of weights that there are kernels for, by name."""
        return tuple(str(dtype).removeprefix("torch.") for dtype in KINDS if self.takes(dtype))

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether there are kernels for weights of this type."""
        return dtype in KINDS and bool(self._kinds() >> KINDS[dtype] & 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The library, or why there is none."""

    library: Library | None
    reason: str = ""


@functools.cache
def find_library() -> Finding:
    """The kernels for this machine, compiled now if they were not before; a few seconds, once."""
    if reason := _unfit_machine():
        return Finding(library=None, reason=reason)
    reasons = []
    for compiler in compilers():
        try:
            return Finding(library=Library(compiled(compiler)))
        except (OSError, AttributeError, subprocess.SubprocessError) as error:
            reasons.append(f"`{shlex.join(compiler)}` could not make them: {_said(error)}")
    return Finding(
        library=None, reason=(*reasons, "no C compiler is installed (gcc, clang, or the package ziglang)")[0]
    )


def compilers() -> Iterator[list[str]]:
    """Commands that may compile C here, best first; the one in `$CC` alone where it is set."""
    if command := os.environ.get("CC"):
        try:
            yield shlex.split(command)
        except ValueError:  # a quotation that does not end
            yield [command]
        return
    for name in ("gcc", "clang", "cc"):
        if found := shutil.which(name):
            yield [found]
    if importlib.util.find_spec("ziglang") is not None:
        yield [sys.executable, "-m", "ziglang", "cc"]


def compiled(compiler: list[str]) -> Path:
    """Path of the library, in the user's cache; raises OSError or SubprocessError when it cannot be made."""
    source = Path(__file__).parent
    marks = [" ".join((*compiler, *FLAGS)), platform.machine(), _c_library(), *sorted(_processor_flags())]
    digest = hashlib.sha256("\n".join(marks).encode())
    for name in SOURCES:
        digest.update((source / name).read_bytes())
    target = cache_folder() / f"kernels-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "kernels.so"
        command = [*compiler, *FLAGS, str(source / "kernels.c"), "-o", str(made), "-lm"]
        subprocess.run(
            command,
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMPILE_SECONDS,
        )
        with made.open("rb") as file:
            os.fsync(file)  # a library that a power failure cut short would be found, and end the process, ever after
        made.replace(target)  # in one move: others may be compiling the same
    return target


def cache_folder() -> Path:
    """Where compiled kernels are kept, a folder of the user's own: `$XDG_CACHE_HOME/llama-adapter`.

    Raises OSError when there is no place for it, when it belongs to somebody else or others may write to it, since
    what lies there is run.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "llama-adapter"
    except RuntimeError as error:  # a container's user that no list of users knows
        raise FileNotFoundError("this user has no home folder: set XDG_CACHE_HOME") from error
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise PermissionError(f"`{folder}` belongs to another user: chown it, or set XDG_CACHE_HOME")
    if status.st_mode & 0o022:
        raise PermissionError(f"others may write to `{folder}`: chmod go-w it, or set XDG_CACHE_HOME")
    return folder


def _said(error: Exception) -> str:
    """One line of what went wrong, in the compiler's own words where it has any."""
    told = getattr(error, "stderr", None) or str(error)
    text = told.decode(errors="replace") if isinstance(told, bytes) else told  # bytes are what a time limit leaves
    lines = text.strip().splitlines()
    return next((line for line in lines if "error" in line), (*lines, "?")[0]).strip()


def _c_library() -> str:
    """Which C library is loaded: what was linked to a newer one cannot be, where systems share a home folder."""
    name = "CS_GNU_LIBC_VERSION"
    return (os.confstr(name) or "") if name in os.confstr_names else ""


def _unfit_machine() -> str:
    """Why the kernels cannot run here; empty where they can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"they are for Linux on x86_64, and this is {sys.platform} on {platform.machine()}"
    if missing := [name for name in NEEDED if name not in _processor_flags()]:
        return f"this processor has no {', '.join(missing)}"
    return ""


@functools.cache
def _processor_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())


def _function(library: ctypes.CDLL, name: str, result: type | None, *arguments: type) -> _Function:
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return function
