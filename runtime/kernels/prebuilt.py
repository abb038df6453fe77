"""Compiled kernels in a wheel, one library for each kind of processor. This file imports no torch.

A file's name contains digests of its sources and of its content: `avx2+avx_vnni-SOURCES-CONTENT.so`. So a library
of other sources is not used, and a damaged one is detected before it is loaded. Loading a truncated library would
end the process.
"""

from collections.abc import Collection
from pathlib import Path

from llama_adapter.runtime.kernels.compiling import FLAGS, digest_of_sources, name_by_content
from llama_adapter.runtime.kernels.instruction_sets import InstructionSet

FOLDER = Path(__file__).parent / "prebuilt"  # exists in a wheel for one platform; not in a checkout


def find_prebuilt(instructions: InstructionSet) -> Path | None:
    """The library for this processor; None if the package contains no libraries.

    Raises OSError if the libraries were made from other sources, or if the one for this processor is damaged.
    """
    if not FOLDER.is_dir():
        return None
    wanted = f"{_stem(instructions, instructions.extras())}-*.so"
    path = next(FOLDER.glob(wanted), None)
    if path is None:
        raise FileNotFoundError(f"`{FOLDER}` has no {wanted}: its libraries are of other sources")
    if path.name != name_by_content(path.read_bytes(), _stem(instructions, instructions.extras())):
        raise OSError(f"`{path}` is damaged: install the package again")
    return path


def name_prebuilt(path: Path, instructions: InstructionSet, extras: Collection[str]) -> Path:
    """Rename a compiled library to the name that `find_prebuilt` looks for on processors with these optional flags."""
    return path.rename(path.with_name(name_by_content(path.read_bytes(), _stem(instructions, extras))))


def _stem(instructions: InstructionSet, extras: Collection[str]) -> str:
    options = (*FLAGS, *instructions.options(extras))
    return f"{instructions.variant(extras)}-{digest_of_sources(*options)}"
