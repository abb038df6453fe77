"""Compiled kernels that a wheel brings, one library for each kind of processor. No torch here.

A file's name says what it was made from and what it holds: `avx2+avx_vnni-SOURCES-CONTENT.so`. So a library of other
sources is not taken, and a damaged one is found before it is loaded; loading a truncated one would end the process.
"""

from collections.abc import Collection
from pathlib import Path

from llama_adapter.runtime.kernels.compiling import FLAGS, digest_of_sources, named_by_content
from llama_adapter.runtime.kernels.instruction_sets import InstructionSet

FOLDER = Path(__file__).parent / "prebuilt"  # in a wheel for one machine; not in a checkout


def find_prebuilt(instructions: InstructionSet) -> Path | None:
    """The library for this processor; None where the package brings none.

    Raises OSError if those that it brings are of other sources, or this one is damaged.
    """
    if not FOLDER.is_dir():
        return None
    wanted = f"{_stem(instructions, instructions.extras())}-*.so"
    path = next(FOLDER.glob(wanted), None)
    if path is None:
        raise FileNotFoundError(f"`{FOLDER}` has no {wanted}: its libraries are of other sources")
    if path != named_by_content(path, _stem(instructions, instructions.extras())):
        raise OSError(f"`{path}` is damaged: install the package again")
    return path


def name_prebuilt(path: Path, instructions: InstructionSet, extras: Collection[str]) -> Path:
    """Rename a compiled library to the name by which it is found on processors with these optional flags."""
    return path.rename(named_by_content(path, _stem(instructions, extras)))


def _stem(instructions: InstructionSet, extras: Collection[str]) -> str:
    options = (*FLAGS, *instructions.options(extras))
    return f"{instructions.variant(extras)}-{digest_of_sources(*options)}"
