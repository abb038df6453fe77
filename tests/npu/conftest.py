"""The fixture that gives torch_npu on the fake CANN; skips where no wheel of it fits."""

import pytest

from tests.npu import wheel


@pytest.fixture(scope="session")
def npu() -> wheel.FakeNpu:
    try:
        return wheel.fake_npu()
    except wheel.UnavailableError as error:
        pytest.skip(str(error))
