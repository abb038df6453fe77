"""Without a GPU, all of these tests fail. They import what `serve` needs, and what scripts/gpu_round.py packs."""

import pytest

from tests.app.conftest import run as run
from tests.cuda.device import missing


@pytest.fixture(scope="session", autouse=True)
def _device() -> None:
    if problem := missing():
        pytest.fail(problem, pytrace=False)
