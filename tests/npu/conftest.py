"""A fixture with torch_npu on the fake CANN. Tests are skipped if no wheel of it fits."""

import pytest

from tests.npu import wheel


@pytest.fixture(scope="session")
def npu() -> wheel.FakeNpu:
    try:
        return wheel.fake_npu()
    except wheel.UnavailableError as error:
        pytest.skip(str(error))
