"""The kernels that the tests of files copy, so that they need not compile any."""

from pathlib import Path

import pytest

from llama_adapter.runtime.kernels.compiling import compiled, compilers
from llama_adapter.runtime.kernels.instruction_sets import choose_instructions


@pytest.fixture(scope="session")
def made() -> Path:
    """The kernels in the cache of the user who runs the tests."""
    instructions, compiler = choose_instructions(), next(compilers(), None)
    if isinstance(instructions, str) or compiler is None:
        pytest.skip(instructions if isinstance(instructions, str) else "no C compiler")
    return compiled(compiler, instructions)
