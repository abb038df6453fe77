"""One browser and one served page for the tests of a file, and a fresh page of the browser for each test.

They are closed at the end of the file: while Playwright is open, its event loop runs in this thread, and no other test
can run one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.app.serving.web.browser import Browser, ServedPage, Visit, chromium, serve_page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import expect

    expect.set_options(timeout=30_000)  # milliseconds
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def served(browser: Browser) -> Iterator[ServedPage]:
    with serve_page() as page:
        yield page


@pytest.fixture
def open_page(browser: Browser, served: ServedPage) -> Iterator[Callable[..., Visit]]:
    """Opens pages, checks them at the end, and waits until the service is idle."""
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
