"""The kernels of each instruction set that they are written for."""

import pytest

from llama_adapter.runtime.kernels.instruction_sets import INSTRUCTION_SETS
from llama_adapter.runtime.kernels.library import Library
from tests.runtime.kernels.instruction_sets import library_for


@pytest.fixture(scope="module", params=[instructions.name for instructions in INSTRUCTION_SETS])
def library(request: pytest.FixtureRequest) -> Library:
    """Tests of sets that this processor lacks are skipped."""
    return library_for(request.param)
