"""The kernels for a named instruction set, if the processor has it, optionally without some optional instructions."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from llama_adapter.runtime.kernels.compiling import (
    FLAGS,
    FOLDER,
    LIBRARIES,
    SOURCES,
    compiled,
    compilers,
    digest_of_sources,
)
from llama_adapter.runtime.kernels.instruction_sets import INSTRUCTION_SETS, InstructionSet, choose_instructions
from llama_adapter.runtime.kernels.library import Library

KEPT = Path(__file__).parents[3] / ".pytest_cache" / "kernels"  # it takes 10 seconds to compile
EMULATED_AMX = "emulated AMX"  # AVX-512 with the instructions of AMX in C: emulated_amx.h


class EmulatedAmx(Library):
    """The kernels with AMX in C."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.num_products = ctypes.CDLL(str(path)).emulated_products  # of matrices, so far
        self.num_products.restype = ctypes.c_int64


@functools.cache
def emulated_amx() -> EmulatedAmx:
    """Skips the test on a processor without AVX-512 and bfloat16."""
    instructions = named("avx512")
    if "avx512_bf16" not in instructions.extras():
        pytest.skip("this processor has no avx512_bf16")
    options = instructions.options(["avx512_bf16"])
    macros = [f"-D__AMX_{name}__=1" for name in ("TILE", "INT8", "BF16")]
    command = [*compiler(), *FLAGS, *options, *macros]
    header = Path(__file__).with_name("emulated_amx.h")
    made = KEPT / f"emulated-{digest_of_sources(*command, header.read_text())}.so"
    if not made.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as folder:
            for source in SOURCES:
                shutil.copy(FOLDER / source, folder)
            shutil.copy(header, Path(folder, "amx.h"))
            library = Path(folder, "kernels.so")
            subprocess.run([*command, f"{folder}/kernels.c", "-o", str(library), *LIBRARIES], check=True)
            library.replace(made)  # atomic: other processes may compile the same
    return EmulatedAmx(made)


def named(name: str) -> InstructionSet:
    """Skips the test on a processor without the instructions."""
    if isinstance(reason := choose_instructions(), str):
        pytest.skip(reason)
    instructions = next(one for one in INSTRUCTION_SETS if one.name == name)
    if missing := instructions.missing():
        pytest.skip(f"this processor has no {', '.join(missing)}")
    return instructions


def compiler() -> list[str]:
    found = next(compilers(), None)
    if found is None:
        pytest.skip("no C compiler")
    return found


@functools.cache
def library_for(name: str, extras: tuple[str, ...] | None = None) -> Library:
    """The library with these optional instructions; by default with all that the processor has.

    Skips the test on a processor without the instructions.
    """
    if name == EMULATED_AMX:
        return emulated_amx()
    instructions = named(name)
    if extras is not None:
        instructions = instructions._replace(optional={flag: instructions.optional[flag] for flag in extras})
        if lacking := [flag for flag in extras if flag not in instructions.extras()]:
            pytest.skip(f"this processor has no {', '.join(lacking)}")
    return Library(compiled(compiler(), instructions))
