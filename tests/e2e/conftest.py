"""One browser and one page for the tests of a file that open it; both start with the first of them.

Not for longer: while a browser is open, its event loop runs in this thread, where no other test could run one.
"""

from collections.abc import Iterator

import pytest

from tests.e2e.browser import Browser, ServedPage, chromium, serve_page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import expect

    expect.set_options(timeout=30_000)  # milliseconds; machines of tests are busy
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def served(browser: Browser) -> Iterator[ServedPage]:
    """After the browser: Gradio finds its event loop, and makes none of its own that nobody closes."""
    with serve_page() as page:
        yield page
