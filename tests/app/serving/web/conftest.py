"""One service of the embedded model, shared by all tests of the page that do not change it."""

from collections.abc import Iterator

import pytest

import llama_adapter.app.serving.web  # noqa: F401 - imports Gradio as the product does, before a test module imports it
from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.serving.online.service import Service
from tests.app.serving.online.waiting import started


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    with started(Service(Captioner.load)) as service:
        yield service
