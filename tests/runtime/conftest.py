"""The kernels of each instruction set that they are written for."""

import pytest

from llama_adapter.runtime.kernels.instruction_sets import INSTRUCTION_SETS
from llama_adapter.runtime.kernels.library import Library
from tests.runtime.kernels.instruction_sets import EMULATED_AMX, library_for


@pytest.fixture(scope="module", params=[*(one.name for one in INSTRUCTION_SETS), EMULATED_AMX])
def library(request: pytest.FixtureRequest) -> Library:
    """Tests of sets that this processor lacks are skipped."""
    return library_for(request.param)
