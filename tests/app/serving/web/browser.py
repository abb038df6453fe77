"""The page, served on a free port by a thread of this process, and a real Chromium that opens the page."""

import asyncio
import base64
import io
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.serving.online.request_handle import RequestHandle
from llama_adapter.app.serving.online.service import Ask, Service, ServiceLimits
from tests.app.serving.online.waiting import Gate, started, wait_for

_PROGRAMS = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
SAMPLES = sorted(path for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))
_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
)


class WatchedService(Service):
    """Counts requests, and signals a cancelled request before the engine notices it at its next step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.cancelled = threading.Event()
        self.num_asked = 0

    def submit(self, ask: Ask) -> RequestHandle:
        handle = super().submit(ask)
        self.num_asked += 1
        cancel = handle.cancel

        def cancel_and_tell() -> None:
            cancel()
            self.cancelled.set()

        handle.cancel = cancel_and_tell  # type: ignore[method-assign]
        return handle


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedPage:
    url: str
    service: WatchedService
    gate: Gate


@contextmanager
def serve_page(*, limits: ServiceLimits | None = None) -> Iterator[ServedPage]:
    """Serve the page of a new service with the embedded model, mounted as in the product."""
    import fastapi
    import uvicorn

    from llama_adapter.app.serving.web.guards import bounded_uploads
    from llama_adapter.app.serving.web.page import build_page, mount_page
    from llama_adapter.app.serving.web.uploads import private_uploads

    gate = Gate()
    service = WatchedService(Captioner.load, limits=limits, observer=gate)
    servers: list[uvicorn.Server] = []

    async def serve() -> None:  # builds the page as well: if another thread did, Gradio would leave an event loop open
        app = fastapi.FastAPI(openapi_url=None)
        mount_page(app, build_page(service, samples=SAMPLES), service)
        config = uvicorn.Config(app, log_level="critical", lifespan="on", timeout_graceful_shutdown=1)
        servers.append(uvicorn.Server(config))
        await servers[0].serve(sockets=[listener])

    with started(service), private_uploads(), bounded_uploads(), socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        try:
            wait_for(lambda: servers and servers[0].started)
            yield ServedPage(url=f"http://127.0.0.1:{listener.getsockname()[1]}", service=service, gate=gate)
        finally:
            gate.open()
            for server in servers:
                server.should_exit = True
            thread.join(30)


class Browser:
    """A Chromium. Its pages share a cache, so that only the first ones load and compile Gradio's scripts."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def new_page(self, *, width: int, height: int, dark: bool) -> Any:
        page = self._context.new_page()
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme="dark" if dark else "light")
        return page


_BRING = """([kind, files, texts]) => {
    const transfer = new DataTransfer();
    for (const {name, mimeType, buffer} of files) {
        const bytes = Uint8Array.from(atob(buffer), one => one.charCodeAt(0));
        transfer.items.add(new File([bytes], name, {type: mimeType}));
    }
    for (const [type, text] of Object.entries(texts)) transfer.setData(type, text);
    const options = {bubbles: true, cancelable: true};
    if (kind === 'paste') {
        return document.activeElement.dispatchEvent(new ClipboardEvent('paste', {...options, clipboardData: transfer}));
    }
    const drag = (step) => document.body.dispatchEvent(new DragEvent(step, {...options, dataTransfer: transfer}));
    return ['dragenter', 'dragover', 'drop'].map(drag).includes(true);
}"""


class Visit:
    """An open page, with its network requests and the errors in its console."""

    def __init__(
        self, browser: Browser, served: ServedPage, *, width: int = 1280, height: int = 900, dark: bool = False
    ) -> None:
        self.served = served
        self.page = browser.new_page(width=width, height=height, dark=dark)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._streams: set[Any] = set()
        self.page.on("request", self._note)
        for end in ("requestfinished", "requestfailed"):
            self.page.on(end, lambda request: self._streams.discard(request))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._note_message)
        # A new visitor. A reload keeps what the page has stored.
        self.page.add_init_script("if (!sessionStorage.begun) { localStorage.clear(); sessionStorage.begun = 'yes'; }")
        self.page.goto(served.url)
        self.page.get_by_role("tab", name="Chat").wait_for()

    def _note(self, request: Any) -> None:
        self.requests.append(request.url)
        if "/gradio_api/queue/data" in request.url:
            self._streams.add(request)

    def _note_message(self, message: Any) -> None:
        if message.type == "error":
            self.complaints.append(f"{message.text} ({message.location.get('url') or ''})")

    def themes(self) -> Iterator[bool]:
        """Change the system's theme to light and then to dark; yields whether it is dark. The page must follow."""
        for dark in (False, True):
            self.page.emulate_media(color_scheme="dark" if dark else "light")
            expect(self.page.locator("body")).to_have_class(re.compile(r"\bdark\b" if dark else r"^((?!\bdark\b).)*$"))
            yield dark

    def open_tab(self, name: str) -> None:
        self.page.get_by_role("tab", name=name).click()

    def wait_for_events(self) -> None:
        deadline = time.monotonic() + 60
        while self._streams:
            assert time.monotonic() < deadline, "the page's event stream stayed open"
            self.page.wait_for_timeout(10)  # the browser's events arrive during this time

    def reload_while_busy(self) -> None:
        """Reload the page during an answer, and leave out what Gradio says about the stream that is cut."""
        self.page.reload()
        self.page.get_by_role("tab", name="Chat").wait_for()
        cut = ("AbortError", "Connection errored out")
        self.complaints = [one for one in self.complaints if not any(words in one for words in cut)]

    def bring(self, kind: str, *files: Path | dict[str, Any], texts: dict[str, str] | None = None) -> bool | None:
        """Drop or paste (`kind`) files, given as paths or as dictionaries with name, mimeType and buffer.

        `texts` are those beside them, by their types. Returns whether the browser itself pastes or opens them.
        """
        sent = [file if isinstance(file, dict) else {"name": file.name, "buffer": file.read_bytes()} for file in files]
        # As a list of numbers, a megabyte would take ten seconds to reach the browser.
        coded = [base64.b64encode(file["buffer"]).decode() for file in sent]
        brought = [{"mimeType": "image/png", **file, "buffer": code} for file, code in zip(sent, coded, strict=True)]
        is_left: bool | None = self.page.evaluate(_BRING, [kind, brought, texts or {}])
        return is_left

    def is_seen_in_system_colours(self, selector: str) -> bool:
        """Whether the first such element has more than one colour where the system's own colours replace the page's."""
        self.page.emulate_media(forced_colors="active")
        with Image.open(io.BytesIO(self.page.locator(selector).first.screenshot())) as image:
            colours = image.convert("RGB").getcolors(2**16) or []
        self.page.emulate_media(forced_colors="none")
        return len(colours) > 1

    @contextmanager
    def slow_uploads(self) -> Iterator[None]:
        """Inside this context, the browser uploads 50 kB a second."""
        client = self.page.context.new_cdp_session(self.page)
        network = {"offline": False, "latency": 0, "downloadThroughput": -1}
        client.send("Network.enable")
        client.send("Network.emulateNetworkConditions", {**network, "uploadThroughput": 50_000})
        try:
            yield
        finally:
            client.send("Network.emulateNetworkConditions", {**network, "uploadThroughput": -1})
            client.detach()

    def press(self, name: str) -> None:
        """Press the button with this name after the page's event stream is closed.

        An event that is sent earlier is late.
        """
        self.wait_for_events()
        self.page.get_by_role("button", name=name, exact=True).locator("visible=true").click()

    def screenshot(self, name: str) -> None:
        """Take a screenshot if SCREENSHOTS names a folder."""
        folder = os.environ.get("SCREENSHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=f"{folder}/{name}.png", full_page=True)

    def overflow(self) -> int:
        """The number of pixels by which the page is wider than its window."""
        wider: int = self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        return wider

    def check(self) -> None:
        """Check that the page contacted no other server, and that its console has no errors."""
        own = (self.served.url, "data:", "blob:")
        foreign = [url for url in self.requests if not url.startswith(own)]
        assert foreign == [], foreign
        assert self.complaints == [], self.complaints


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium.

    It has a folder, which is removed afterwards: without one, Chromium compiles the scripts again for each page.
    """
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, filter(None, _PROGRAMS))))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            folder,
            executable_path=program,
            args=list(_ARGUMENTS),
            permissions=["camera", "clipboard-read", "clipboard-write"],
            reduced_motion="reduce",
            accept_downloads=True,
        )
        try:
            yield Browser(context)
        finally:
            context.close()


def expect(locator: Any) -> Any:
    """Playwright's assertions, imported late."""
    from playwright.sync_api import expect

    return expect(locator)


def is_in_window(visit: Any, selector: str) -> bool:
    """Whether the whole element is visible without scrolling."""
    box, window = visit.page.locator(selector).bounding_box(), visit.page.viewport_size
    right, bottom = box["x"] + box["width"], box["y"] + box["height"]
    return bool(box["x"] >= 0 and box["y"] >= 0 and right <= window["width"] and bottom <= window["height"])
