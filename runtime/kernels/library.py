"""The kernels as a shared library: compiled once with the machine's C compiler, cached, and declared to ctypes.

The best instruction set of the processor is taken, or the one that the environment variable LLAMA_ADAPTER_ISA names.
The kernels are optional: without a compiler, or on another processor, torch's own kernels compute.
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
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llama_adapter.runtime.schemes.packed import PackedLayout

FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden")
CHOICE = "LLAMA_ADAPTER_ISA"  # environment variable: the name of an instruction set


class InstructionSet(NamedTuple):
    """A set of vector instructions that the kernels are written for."""

    name: str
    machine: str  # as `platform.machine()` names it
    # Processor flags as Linux names them, with the compiler's option for each.
    needed: Mapping[str, str]
    optional: Mapping[str, str]  # used where the processor has them

    def missing(self) -> list[str]:
        """Flags that this processor lacks."""
        return [flag for flag in self.needed if flag not in processor_flags()]

    def options(self) -> list[str]:
        """Options of the compiler for this processor."""
        found = [option for flag, option in self.optional.items() if flag in processor_flags()]
        return [*self.needed.values(), *found]


INSTRUCTION_SETS = (  # the best first
    InstructionSet(
        "avx512",
        "x86_64",
        needed={
            "avx512f": "-mavx512f",
            "avx512bw": "-mavx512bw",
            "avx512vl": "-mavx512vl",
            "avx512dq": "-mavx512dq",
            "avx512_vnni": "-mavx512vnni",
        },
        optional={"avx512_bf16": "-mavx512bf16"},
    ),
    InstructionSet(
        "avx2",
        "x86_64",
        needed={"avx2": "-mavx2", "fma": "-mfma", "f16c": "-mf16c"},
        optional={"avx_vnni": "-mavxvnni"},
    ),
    InstructionSet(
        "neon",
        "aarch64",
        needed={"asimd": "-mcpu=generic"},
        # The last of these options counts. A processor with bf16 has asimddp.
        optional={"asimddp": "-mcpu=generic+dotprod", "bf16": "-mcpu=generic+dotprod+bf16"},
    ),
)
SOURCES = (
    *("kernels.c", "decoder.h", "encoder.h", "linear.h", "tiles.h", "parallel.h", "vector.h"),
    *(f"vector_{instructions.name}.h" for instructions in INSTRUCTION_SETS),
)
# Of weights, by the dtype that stores them; enum in tiles.h. uint8 holds two weights of 4 bits.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}

# Fields of PackedLayout, and what the library calls them.
_LAYOUT = {"version": "layout_version", "block": "block", "int8_added": "int8_added"}
_COMPILE_SECONDS = 300
_Function = Any  # of a library: ctypes has no public name for its type

_ALIGNMENT = 64  # bytes of scratch memory, as kernels.c requires


class _Scratch(NamedTuple):
    """Working memory of the kernels, which each thread keeps between calls and releases when it ends."""

    memory: Tensor | None
    address: int  # of its first aligned byte
    num_bytes: int  # from there


_NONE = _Scratch(None, 0, 0)


class _Held(threading.local):
    scratch = _NONE  # each thread's own


_held = _Held()


def in_scratch(kernel: Callable[..., int]) -> Callable[..., None]:
    """A function of kernels.c without its last two arguments, scratch and its size.

    It raises RuntimeError, as torch does for tensors, if memory is insufficient. Then nothing was computed, and the
    thread holds no scratch.
    """

    def run(*arguments: int) -> None:
        scratch = _held.scratch
        while needed := kernel(*arguments, scratch.address, scratch.num_bytes):
            scratch = _held.scratch = _NONE  # release the smaller one first
            scratch = _held.scratch = _allocated(needed + needed // 4)  # the next step of a decoder needs a little more

    return run


def _allocated(num_bytes: int) -> _Scratch:
    memory = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8, device="cpu")
    return _Scratch(memory, -memory.data_ptr() % _ALIGNMENT + memory.data_ptr(), num_bytes)


class Library:
    """The loaded kernels. Raises OSError if `path` is not a library."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        i32, i64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
        self.packed_bytes = _function(loaded, "kernels_packed_bytes", i64, i32, i64, i64)
        self.pack = _function(loaded, "kernels_pack", None, i32, i64, i64, pointer, pointer, pointer, i32)
        scratch = (pointer, i64)
        self.linear = in_scratch(
            _function(loaded, "kernels_linear", i64, pointer, pointer, i32, i64, pointer, i32, *scratch)
        )
        self.blocks = in_scratch(_function(loaded, "kernels_blocks", i64, pointer, pointer, i64, i64, i32, *scratch))
        self.forward = in_scratch(_function(loaded, "kernels_forward", i64, pointer, pointer, i32, *scratch))

        self.layout = PackedLayout(
            **{name: _function(loaded, f"kernels_{source}", i32)() for name, source in _LAYOUT.items()}
        )
        self.instruction_set: str = _function(loaded, "kernels_instruction_set", ctypes.c_char_p)().decode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The library, or the reason why there is none."""

    library: Library | None
    reason: str = ""


@functools.cache
def find_library() -> Finding:
    """The kernels for this machine; the first use compiles them, which takes a few seconds."""
    instructions = choose_instructions()
    if isinstance(instructions, str):
        return Finding(library=None, reason=instructions)
    reasons = []
    for compiler in compilers():
        try:
            return Finding(library=Library(compiled(compiler, instructions)))
        except (OSError, AttributeError, subprocess.SubprocessError) as error:
            reasons.append(f"`{shlex.join(compiler)}` could not make them: {_said(error)}")
    return Finding(
        library=None, reason=(*reasons, "no C compiler is installed (gcc, clang, or the package ziglang)")[0]
    )


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
        yield [sys.executable, "-m", "ziglang", "cc"]


def compiled(compiler: list[str], instructions: InstructionSet) -> Path:
    """Path of the library in the user's cache, compiled if missing; raises OSError or SubprocessError."""
    source = Path(__file__).parent
    command = [*compiler, *FLAGS, *instructions.options()]
    marks = [" ".join(command), platform.machine(), _c_library()]
    digest = hashlib.sha256("\n".join(marks).encode())
    for name in SOURCES:
        digest.update((source / name).read_bytes())
    target = cache_folder() / f"kernels-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "kernels.so"
        subprocess.run(
            [*command, str(source / "kernels.c"), "-o", str(made), "-lm"],
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMPILE_SECONDS,
        )
        with made.open("rb") as file:
            os.fsync(file)  # or a power failure could leave a truncated library, which crashes every later process
        made.replace(target)  # atomic: other processes may compile the same
    return target


def cache_folder() -> Path:
    """The user's cache folder, `$XDG_CACHE_HOME/llama-adapter`.

    Raises OSError if it cannot be made, belongs to another user or is writable by others, because its libraries are
    executed.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "llama-adapter"
    except RuntimeError as error:  # a container's user without an entry in passwd
        raise FileNotFoundError("this user has no home folder: set XDG_CACHE_HOME") from error
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise PermissionError(f"`{folder}` belongs to another user: chown it, or set XDG_CACHE_HOME")
    if status.st_mode & 0o022:
        raise PermissionError(f"others may write to `{folder}`: chmod go-w it, or set XDG_CACHE_HOME")
    return folder


def _said(error: Exception) -> str:
    """One line of the failure, of the compiler's own output if there is any."""
    told = getattr(error, "stderr", None) or str(error)
    text = told.decode(errors="replace") if isinstance(told, bytes) else told  # bytes after a timeout
    lines = text.strip().splitlines()
    return next((line for line in lines if "error" in line), (*lines, "?")[0]).strip()


def _c_library() -> str:
    """The C library and its version: systems with different ones may share a home folder."""
    name = "CS_GNU_LIBC_VERSION"
    return (os.confstr(name) or "") if name in os.confstr_names else ""


def choose_instructions() -> InstructionSet | str:
    """The instruction set for this machine, or the reason why there is none."""
    machine = platform.machine() if sys.platform == "linux" else ""
    choice = [instructions for instructions in INSTRUCTION_SETS if instructions.machine == machine]
    if not choice:
        return f"they are for Linux on x86_64 and aarch64, and this is {sys.platform} on {platform.machine()}"
    names = [instructions.name for instructions in choice]
    wanted = os.environ.get(CHOICE)
    if wanted and wanted not in names:
        return f"{CHOICE} is {wanted!r}; it can be {' or '.join(names)}"
    choice = [instructions for instructions in choice if not wanted or instructions.name == wanted]
    for instructions in choice:
        if not instructions.missing():
            return instructions
    return f"this processor has no {', '.join(choice[-1].missing())}"


@functools.cache
def processor_flags() -> frozenset[str]:
    """Features of an x86 or ARM processor as Linux names them; empty if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    listed = (line for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(listed, "").partition(":")[2].split())


def _function(library: ctypes.CDLL, name: str, result: type | None, *arguments: type) -> _Function:
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return function
