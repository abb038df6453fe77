"""One browser and one served page for all browser tests of a session, and a fresh page of the browser for each.

The browser tests run last: while Playwright is open, its event loop runs in this thread, so no other test can run one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.browser import Browser, ServedPage, Visit, chromium, serve_page


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name.startswith("test_browser_"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import expect

    expect.set_options(timeout=30_000)  # milliseconds
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def served(browser: Browser) -> Iterator[ServedPage]:
    with serve_page() as page:
        yield page


@pytest.fixture
def open_page(browser: Browser, served: ServedPage) -> Iterator[Callable[..., Visit]]:
    """Opens pages, checks them at the end, and leaves the service idle."""
    visits: list[Visit] = []

    def open_page(**window: Any) -> Visit:
        visits.append(Visit(browser, served, **window))
        return visits[-1]

    yield open_page
    served.gate.open()
    for visit in visits:
        visit.page.close()
    assert served.service.wait_until_idle(60)
    for visit in visits:
        visit.check()


@pytest.fixture
def visit(open_page: Callable[..., Visit]) -> Visit:
    return open_page()
