"""What a browser may ask of the mounted page: an ASGI layer with a list, and headers that keep the page to itself."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Gradio serves many things beside its page: a fetcher of web addresses, links that store a session on the disk,
# video editing, editors of the page's own code. Only these are needed.
_PAGE = ("/", "/config", "/config/", "/theme.css", "/favicon.ico", "/robots.txt", "/manifest.json")
_PAGE_BELOW = ("/assets/", "/static/", "/svelte/", "/gradio_api/heartbeat/")
_READ = ("/gradio_api/queue/data", "/gradio_api/upload_progress", "/gradio_api/startup-events", "/gradio_api/app_id")
_WRITE = ("/gradio_api/queue/join", "/gradio_api/queue/join/", "/gradio_api/upload", "/gradio_api/cancel")
_WRITE_BELOW = ("/gradio_api/run/", "/gradio_api/reset")
EVENT_PATHS = ("/gradio_api/queue/", "/gradio_api/cancel", *_WRITE_BELOW)  # of those, what Gradio reads into memory
_FILE = "/gradio_api/file="

# Gradio's page builds functions from text and has style attributes everywhere; all of it comes from this server.
_CONTENT_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "media-src 'self' data: blob:",
        "font-src 'self' data:",
        "connect-src 'self' data: blob:",
        "worker-src 'self' blob:",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = (
    (b"content-security-policy", _CONTENT_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"permissions-policy", b"camera=(self), microphone=(), geolocation=()"),
)


def is_open(method: str, path: str) -> bool:
    """Whether the page needs this; `path` is below the mount and not percent-encoded."""
    if method in ("GET", "HEAD"):
        if path.startswith(_FILE):
            # Twice encoded, an address would pass as a file's name.
            return "://" not in unquote(unquote(path))
        return path in _PAGE or path in _READ or path.startswith(_PAGE_BELOW)
    return method == "POST" and (path in _WRITE or path.startswith(_WRITE_BELOW))


class ClosedRoutes:
    """Lets through what the page needs, from the page itself, and adds the headers; the rest is not found."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        path = str(scope["path"]).removeprefix(str(scope.get("root_path", ""))) or "/"
        if not is_open(scope["method"], path):
            await _refuse(send, 404, b"There is nothing here; the page itself is at its root.")
        elif scope["method"] == "POST" and _comes_from_elsewhere(scope):
            await _refuse(send, 403, b"Requests of other sites are not answered.")
        else:
            await self._app(scope, receive, _with_headers(send))


def _comes_from_elsewhere(scope: Scope) -> bool:
    """Browsers say where a request comes from; other clients say nothing and have nobody's cookies."""
    return any(name == b"sec-fetch-site" and value != b"same-origin" for name, value in scope["headers"])


def _with_headers(send: Send) -> Send:
    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            names = {name for name, _ in _HEADERS}
            kept = [(name, value) for name, value in message.get("headers", ()) if name.lower() not in names]
            message = {**message, "headers": [*kept, *_HEADERS]}
        await send(message)

    return send_more


async def _refuse(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *_HEADERS]})
    await send({"type": "http.response.body", "body": body})
