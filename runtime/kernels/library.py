"""The kernels as a shared library for ctypes: a prebuilt one from a wheel, or one compiled on this machine.

The kernels are optional. If there is no library for this processor, torch's own kernels are used. This file imports no
torch.
"""

import ctypes
import functools
import os
import shlex
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llama_adapter.runtime.kernels.compiling import compiled, compilers, said
from llama_adapter.runtime.kernels.instruction_sets import AMX, InstructionSet, choose_instructions
from llama_adapter.runtime.kernels.layout import PackedLayout
from llama_adapter.runtime.kernels.prebuilt import find_prebuilt
from llama_adapter.runtime.user_cache import working_cache

# Kinds of weights by the name of their dtype, as in the enum of tiles.h. A uint8 holds two 4-bit weights.
KINDS = {"float32": 0, "bfloat16": 1, "int8": 2, "uint8": 3}

# Fields of PackedLayout, and their names in the library.
_LAYOUT = {"version": "layout_version", "block": "block", "int8_added": "int8_added"}
_Function = Any  # a function of a library: ctypes has no public name for its type

_ALIGNMENT = 64  # bytes of scratch memory, as kernels.c requires


class _Scratch(NamedTuple):
    """Scratch memory of the kernels. Each thread keeps it between calls and releases it when the thread ends."""

    memory: np.ndarray | None
    address: int  # first aligned byte of `memory`
    num_bytes: int  # beginning at `address`


_NONE = _Scratch(None, 0, 0)


class _Held(threading.local):
    scratch = _NONE  # each thread's own


_held = _Held()


def in_scratch(kernel: Callable[..., int]) -> Callable[..., None]:
    """Wrap a function of kernels.c so that its last two arguments, the scratch memory and its size, are supplied.

    The wrapped function raises MemoryError if memory is insufficient. Then nothing was computed, and the thread holds
    no scratch memory. It raises RuntimeError if a sum over ranks failed.
    """

    def run(*arguments: int) -> None:
        scratch = _held.scratch
        while needed := kernel(*arguments, scratch.address, scratch.num_bytes):
            if needed < 0:
                raise RuntimeError("a sum over ranks failed")
            scratch = _held.scratch = _NONE  # release the smaller one first
            scratch = _held.scratch = _allocated(needed + needed // 4)  # the next step of a decoder needs a little more

    return run


def _allocated(num_bytes: int) -> _Scratch:
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    return _Scratch(memory, -memory.ctypes.data % _ALIGNMENT + memory.ctypes.data, num_bytes)


class Library:
    """The loaded kernels. Raises OSError if `path` is not a library, and AttributeError if it lacks a function."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        i32, i64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
        self.packed_bytes = _function(loaded, "kernels_packed_bytes", i64, i32, i64, i64)
        self.pack = _function(loaded, "kernels_pack", None, i32, i64, i64, pointer, pointer, pointer, i32)
        self.round_int4 = _function(
            loaded, "kernels_round_int4", None, i32, i64, i64, pointer, pointer, pointer, pointer, i32
        )
        scratch = (pointer, i64)
        self.linear = in_scratch(
            _function(loaded, "kernels_linear", i64, pointer, pointer, i32, i64, pointer, i32, *scratch)
        )
        sizes = (i64, i64, i64)
        self.blocks = in_scratch(_function(loaded, "kernels_blocks", i64, pointer, pointer, *sizes, i32, *scratch))
        rows = (i32, i64, i64)
        self.swiglu = _function(loaded, "kernels_swiglu", None, *rows, *(pointer,) * 3, i32)
        self.rms_norm = _function(loaded, "kernels_rms_norm", None, *rows, ctypes.c_float, *(pointer,) * 5, i32)
        self.forward = in_scratch(_function(loaded, "kernels_forward", i64, pointer, pointer, i32, *scratch))

        self.layout = PackedLayout(
            **{name: _function(loaded, f"kernels_{source}", i32)() for name, source in _LAYOUT.items()}
        )
        input_type = _function(loaded, "kernels_input_type", i32, i32)
        self.multiplies_bfloat16: bool = input_type(KINDS["bfloat16"]) == KINDS["bfloat16"]
        self.uses_amx = bool(_function(loaded, "kernels_has_matrices", i32)())
        self.instruction_set: str = _function(loaded, "kernels_instruction_set", ctypes.c_char_p)().decode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The library, or the reason why there is none."""

    library: Library | None
    variant: str = ""  # the instruction set that it uses, with optional flags: `avx2+avx_vnni`
    origin: str = ""  # prebuilt or compiled, the compiler, the library's path, and why a better one is not used
    reason: str = ""


@functools.cache
def find_library() -> Finding:
    """The kernels for this machine, prebuilt or compiled. Compiling takes a few seconds at the first use.

    Raises UsageError and DeviceError as `choose_instructions` does.
    """
    instructions = choose_instructions()
    if isinstance(instructions, str):
        return Finding(library=None, reason=instructions)
    extras, unusable = instructions.extras(), ""
    try:
        if path := find_prebuilt(instructions):
            return _finding(Library(path), instructions, extras, f"prebuilt, {path}")
    except (OSError, AttributeError) as error:
        unusable = f"; not the prebuilt ones: {said(error)}"
    try:
        if os.statvfs(place := working_cache()).f_flag & os.ST_NOEXEC:
            raise PermissionError(f"`{place}` is mounted noexec: set XDG_CACHE_HOME")
    except OSError as error:
        return Finding(library=None, reason=f"there is no place to keep them: {said(error)}{unusable}")
    reasons = []
    # Compilers may be older than the processor: GCC 8 of RHEL 8 has no option for bfloat16.
    candidates = [*compilers()]
    for count in range(len(extras), -1, -1):
        lacks = "".join(f"; without {flag}" for flag in extras[count:])
        for compiler in candidates.copy():
            command = shlex.join(compiler)
            try:
                path = compiled(compiler, instructions, extras[:count])
                origin = f"compiled by `{command}`, {path}{lacks}{unusable}"
                return _finding(Library(path), instructions, extras[:count], origin)
            except (OSError, AttributeError, subprocess.SubprocessError) as error:
                reasons.append(f"`{command}` could not make them: {said(error)}")
                if not isinstance(error, subprocess.CalledProcessError):
                    candidates.remove(compiler)  # it does not start, does not end, or makes no library
    reason = (*reasons, "no C compiler is installed (gcc, clang, or the package ziglang)")[0]
    return Finding(library=None, reason=reason + unusable)


def _finding(library: Library, instructions: InstructionSet, extras: tuple[str, ...], origin: str) -> Finding:
    if AMX in extras and not library.uses_amx:
        extras, origin = tuple(flag for flag in extras if flag != AMX), f"{origin}; the system refuses {AMX}"
    return Finding(library=library, variant=instructions.variant(extras), origin=origin)


def _function(library: ctypes.CDLL, name: str, result: type | None, *arguments: type) -> _Function:
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return function
