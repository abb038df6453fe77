"""A captioner of the tiny model, and services of other models."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import httpx
import pytest

from llama_adapter import Captioner
from llama_adapter.app.serving.online.service import Service
from tests.app.golden import model_options
from tests.app.serving.http_api.live import client_of


@contextmanager
def client_for(**model: Any) -> Iterator[httpx.Client]:
    """A client of a service of this model, over a socket."""
    service = Service(lambda: Captioner.load(**model))
    service.start()
    service.wait_until_ready()
    with closing(service), client_of(service) as client:
        client.timeout = httpx.Timeout(300.0)
        yield client


@pytest.fixture(scope="package")
def captioner() -> Iterator[Captioner]:
    """Answers four pictures or texts at once. Tests must not change it."""
    with Captioner.load(**model_options(), batch_size=4) as loaded:
        yield loaded
