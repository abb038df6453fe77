"""The outermost layer: an id, a line in the log and a count for every HTTP request, and no exception beyond it.

What is asked and answered is never logged: no text, no picture, no query string.
"""

import logging
import time
import traceback
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llama_adapter.app.http_api.metrics import Metrics
from llama_adapter.app.http_api.problems import CLIENT_GONE, internal_error

_access_log = logging.getLogger("llama_adapter.access")
_error_log = logging.getLogger("llama_adapter.server")
_KEY = "llama_adapter.visit"
UNKNOWN_ROUTE = "other"
OWN_PATHS: Mapping[str, str] = {  # and their methods
    "/v1/chat/completions": "POST",
    **dict.fromkeys(("/v1/models", "/health", "/ready", "/metrics"), "GET"),
    **dict.fromkeys(("/docs", "/openapi.json"), "GET, HEAD"),
}


@dataclass(slots=True)
class Visit:
    """One HTTP request, as the log tells of it."""

    id: str = field(default_factory=lambda: f"req_{uuid.uuid4().hex}")
    status: int = 0  # 0: nothing was sent yet
    is_left: bool = False  # the client has hung up
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def logged_status(self) -> int:
        """What was sent, or that nobody was there to read it."""
        return CLIENT_GONE if self.is_left or not self.status else self.status


def visit_of(scope: Scope) -> Visit:
    """The visit that a request is part of."""
    visit: Visit = scope[_KEY]
    return visit


class AccessLog:
    """Gives every request its `x-request-id`, logs and counts it, and answers 500 where the application raised."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        visit = scope[_KEY] = Visit()
        started = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = visit.id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as error:
            await _answer_failure(error, visit, send_with_id)
        finally:
            self._tell(scope, visit, (time.perf_counter() - started) * 1e3)

    def _tell(self, scope: Scope, visit: Visit, elapsed_ms: float) -> None:
        route = _route(scope)
        method = scope["method"] if scope["method"].isalpha() and len(scope["method"]) < 10 else "other"
        self._metrics.http_request(method=method, route=route, status=visit.logged_status)
        _access_log.info(
            "%s %s %d %.0f ms, %d+%d tokens, %s",
            method,
            route,
            visit.logged_status,
            elapsed_ms,
            visit.prompt_tokens,
            visit.completion_tokens,
            visit.id,
        )


async def _answer_failure(error: Exception, visit: Visit, send: Send) -> None:
    """Answer what nobody foresaw. Its message may quote the request, so the log has only its kind and place."""
    is_stalled = isinstance(error, TimeoutError) and visit.status > 0  # takes nothing any more: see EventStream
    if is_stalled or isinstance(error, ClientDisconnect):
        visit.is_left = True
        return
    _error_log.error("%s, %s", kind_and_place(error), visit.id)
    if visit.status:
        return  # too late to say so; the server cuts the connection off
    body = internal_error().body()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _route(scope: Scope) -> str:
    """The pattern of the path: paths themselves are the client's words."""
    if scope["path"] in OWN_PATHS:  # also where a guard answered before there was any routing
        return str(scope["path"])
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) and path else UNKNOWN_ROUTE


def kind_and_place(error: Exception) -> str:
    """The type of an exception and the innermost three places it came through, for a log; never its message."""
    places = traceback.extract_tb(error.__traceback__)[-3:]
    shown = " < ".join(f"{place.name} ({place.filename}:{place.lineno})" for place in reversed(places))
    return f"{type(error).__name__} in {shown}"
