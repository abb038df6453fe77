"""The kernels for a named instruction set, if the processor has it, optionally without some optional instructions."""

import functools

import pytest

from llama_adapter.runtime.kernels.compiling import compiled, compilers
from llama_adapter.runtime.kernels.instruction_sets import INSTRUCTION_SETS, choose_instructions
from llama_adapter.runtime.kernels.library import Library


@functools.cache
def library_for(name: str, extras: tuple[str, ...] | None = None) -> Library:
    """The library with these optional instructions; by default with all that the processor has.

    Skips the test on a processor without the instructions.
    """
    if isinstance(reason := choose_instructions(), str):
        pytest.skip(reason)
    instructions = next(one for one in INSTRUCTION_SETS if one.name == name)
    if missing := instructions.missing():
        pytest.skip(f"this processor has no {', '.join(missing)}")
    if extras is not None:
        instructions = instructions._replace(optional={flag: instructions.optional[flag] for flag in extras})
        if lacking := [flag for flag in extras if flag not in instructions.extras()]:
            pytest.skip(f"this processor has no {', '.join(lacking)}")
    compiler = next(compilers(), None)
    if compiler is None:
        pytest.skip("no C compiler")
    return Library(compiled(compiler, instructions))
