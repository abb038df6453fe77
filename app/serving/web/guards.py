"""Closes what Gradio leaves open, with a subclass of its Blocks, one of its multipart parser, and a middleware.

- Gradio downloads web addresses that an event names as files, and checks paths only if the event says that they are
  files. `GuardedBlocks` refuses events that name anything but uploaded files.
- Gradio prints a traceback with the event's values for every failed event. `GuardedBlocks` logs one line instead.
- Gradio keeps form fields of any size in memory, fills the disk, and keeps the parts of an interrupted upload.
  `BoundedUploads` refuses form fields, leaves disk space free, and deletes these parts.
- Gradio serves a proxy, deep links, code editors and video tools next to its page, and answers requests of other sites.
  `ClosedRoutes`, a middleware, refuses these requests and adds the security headers.
"""

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import gradio as gr
from gradio import route_utils
from starlette.applications import Starlette
from starlette.datastructures import FormData, Headers, MutableHeaders
from starlette.formparsers import MultiPartException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llama_adapter.app.serving.http_api.access import kind_and_place
from llama_adapter.app.serving.http_api.bodies import BodyLimit, path_of
from llama_adapter.app.serving.http_api.guards import MAX_SEPARATORS, is_of_other_origin
from llama_adapter.app.serving.web.uploads import ForeignFileError, refuse_foreign_files

MAX_FAULT_LINES_A_MINUTE = 60
MAX_EVENT_BYTES = 8 * 2**20  # the values of one event; the file names of a large folder take half of it
LEFT_FREE_BYTES = 2**30  # disk space that uploads leave free

_log = logging.getLogger("llama_adapter")


class GuardedBlocks(gr.Blocks):
    """Gradio's Blocks that checks the files of every event, and logs failed events without their values."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._faults = FaultLog()
        self.has_launched = True  # otherwise Gradio serves any file whose path a handler returns

    async def process_api(self, block_fn: Any, inputs: list[Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Check and run an event. Gradio calls this for every event."""
        try:
            if kwargs.get("iterator") is None:  # later updates of a generator have the same inputs
                refuse_foreign_files([inputs, getattr(kwargs.get("event_data"), "_data", None)])
            result: dict[str, Any] = await super().process_api(block_fn, inputs, *args, **kwargs)
        except ForeignFileError:
            raise gr.Error(
                "Only files uploaded on this page can be used. Choose the file again.", print_exception=False
            ) from None
        except gr.Error as error:
            if error.print_exception:
                self._faults.tell(error)
                error.print_exception = False
            raise
        except Exception as error:
            self._faults.tell(error)
            raise _SilentError from None
        return result


class _SilentError(gr.Error):
    """An error for which Gradio prints no traceback. It answers with an error of null, as for any exception."""

    def __init__(self) -> None:
        super().__init__(print_exception=False)
        self.message = None


class FaultLog:
    """Logs one line for each failed event, at most `MAX_FAULT_LINES_A_MINUTE`; further events are only counted."""

    def __init__(self) -> None:
        self._minute = self._num_faults = 0

    def tell(self, error: Exception) -> None:
        """Log the type and place of an error. Its message is left out, because it may quote the event's values."""
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            num_untold = self._num_faults - MAX_FAULT_LINES_A_MINUTE
            if num_untold > 0:
                _log.error("page: %d more events failed in the same minute", num_untold)
            self._minute, self._num_faults = minute, 0
        self._num_faults += 1
        if self._num_faults <= MAX_FAULT_LINES_A_MINUTE:
            _log.error("page: an event failed: %s", kind_and_place(error))


class BoundedUploads(route_utils.GradioMultiPartParser):
    """Gradio's multipart parser with further limits: the parser itself only limits the size of each file."""

    def on_headers_finished(self) -> None:
        """Refuse parts that are not files, and refuse files if the disk has no room."""
        super().on_headers_finished()
        if self._current_part.file is None:
            raise MultiPartException("An upload has only files.")
        if shutil.disk_usage(self._current_part.file.file.name).free < LEFT_FREE_BYTES:
            raise MultiPartException("The server's disk has no room for more files.")

    async def parse(self) -> FormData:
        """The files. The parts of an interrupted upload are deleted."""
        try:
            return await super().parse()
        except BaseException:
            for file in self._files_to_close_on_error:
                file.close()
                Path(file.name).unlink(missing_ok=True)
            raise


@contextmanager
def bounded_uploads() -> Iterator[None]:
    """Inside this context, Gradio parses uploads with `BoundedUploads`, and deletes old ones also after an error.

    Gradio has no setting for this.
    """
    before, delete = route_utils.GradioMultiPartParser, route_utils.delete_files_created_by_app

    def try_to_delete(blocks: gr.Blocks, age: int | None) -> None:
        with suppress(RuntimeError, OSError):  # a file came meanwhile: Gradio would delete no more
            delete(blocks, age)

    route_utils.GradioMultiPartParser = BoundedUploads  # type: ignore[misc]
    route_utils.delete_files_created_by_app = try_to_delete
    try:
        yield
    finally:
        route_utils.GradioMultiPartParser = before  # type: ignore[misc]
        route_utils.delete_files_created_by_app = delete


_PAGE: Final = ("/", "/config", "/config/", "/theme.css", "/favicon.ico", "/robots.txt", "/manifest.json")
_PAGE_BELOW: Final = ("/assets/", "/static/", "/svelte/", "/gradio_api/heartbeat/")
_READ: Final = ("/gradio_api/queue/data", "/gradio_api/startup-events", "/gradio_api/app_id", "/gradio_api/info")
_WRITE: Final = ("/gradio_api/queue/join", "/gradio_api/queue/join/", "/gradio_api/upload", "/gradio_api/cancel")
_WRITE_BELOW: Final = ("/gradio_api/run/", "/gradio_api/reset")
_FILE: Final = "/gradio_api/file="
_EVENT_PATHS: Final = ("/gradio_api/queue/", "/gradio_api/cancel", *_WRITE_BELOW)  # Gradio loads these bodies whole

# Gradio's page evaluates text as code and uses style attributes, so both are allowed. Everything else must come from
# this server.
_CONTENT_POLICY: Final = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; media-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self' data: blob:; worker-src 'self' blob:; object-src 'none'; base-uri 'self'; "
    "form-action 'self'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "content-security-policy": _CONTENT_POLICY,
    "cross-origin-resource-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
}


def add_page_guards(app: Starlette) -> None:
    """Put the guards before Gradio's application."""
    app.add_middleware(
        BodyLimit,
        prefix=_EVENT_PATHS,
        max_bytes=MAX_EVENT_BYTES,
        max_bytes_under_way=8 * MAX_EVENT_BYTES,
        timeout_s=30.0,
        max_separators=MAX_SEPARATORS,
    )
    app.add_middleware(ClosedRoutes)  # added last: the outermost


def is_open(method: str, path: str) -> bool:
    """Whether the page needs this route; `path` is relative to the mount and percent-decoded."""
    if method in ("GET", "HEAD"):
        if path.startswith(_FILE):
            return "://" not in unquote(unquote(path))  # Gradio would fetch a URL here, even if it is encoded twice
        return path in _PAGE or path in _READ or path.startswith(_PAGE_BELOW)
    return method == "POST" and (path in _WRITE or path.startswith(_WRITE_BELOW))


class ClosedRoutes:
    """ASGI middleware: passes on requests of the page itself to routes that it needs, and adds security headers.

    It must be the outermost: Gradio's own middleware lets every page of a local server read the answers to its requests
    (CORS). It answers only requests with the header Origin, which is not passed on.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        path = path_of(scope) or "/"
        app = self._app
        if not is_open(scope["method"], path):
            app = PlainTextResponse("Not found. The page is at the root, the API of `web` below /v1/.", 404)
        elif is_of_other_origin(scope) and not _is_link(scope):
            app = PlainTextResponse("Requests from other sites are refused.", 403)
        headers = [(name, value) for name, value in scope["headers"] if name != b"origin"]
        await app({**scope, "headers": headers}, receive, _with_headers(send))


def _is_link(scope: Scope) -> bool:
    """Whether the browser shows the answer as a page, which the page with the link cannot read."""
    headers = Headers(scope=scope)
    return scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"


def _with_headers(send: Send) -> Send:
    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(_HEADERS)
        await send(message)

    return send_more
