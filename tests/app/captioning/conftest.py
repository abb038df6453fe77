"""A captioner of the tiny model."""

from collections.abc import Iterator

import pytest

from llama_adapter import Captioner
from tests.app.golden import model_options


@pytest.fixture(scope="package")
def captioner() -> Iterator[Captioner]:
    """Answers four pictures or texts at once. Tests must not change it."""
    with Captioner.load(**model_options(), batch_size=4) as loaded:
        yield loaded
