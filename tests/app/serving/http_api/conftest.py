"""One API behind a real socket for the whole session, with a service that gives the answers set by a test."""

from collections.abc import Iterator

import httpx
import pytest

from tests.app.serving.http_api.live import StubService, client_of

_SERVICE = StubService()


@pytest.fixture(scope="session")
def server() -> Iterator[httpx.Client]:
    with client_of(_SERVICE) as client:
        yield client


@pytest.fixture
def service() -> StubService:
    _SERVICE.__init__()  # type: ignore[misc]
    return _SERVICE


@pytest.fixture
def client(server: httpx.Client, service: StubService) -> httpx.Client:
    return server
