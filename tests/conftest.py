"""How properties are tried: the same examples each time, and however long one takes on a busy machine.

Other examples, and more of them: `pytest --hypothesis-profile explore`.
"""

import os

import pytest
from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def _run_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A folder that all processes of a test run share, for files that take long to make."""
    own = tmp_path_factory.getbasetemp()
    os.environ["TEST_RUN_FOLDER"] = str(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)
