"""The outermost layer: request id, access log, metrics, and an answer for every exception.

The log never holds the content of a request or an answer: no text, no picture, no query string. Of a path where nothing
is served it holds the path.
"""

import asyncio
import logging
import time
import traceback
import uuid
from collections.abc import Container
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llama_adapter.app.serving.http_api.bodies import path_of
from llama_adapter.app.serving.http_api.errors import CLIENT_GONE, ERROR_CODE, ApiError, of_answer
from llama_adapter.app.serving.http_api.metrics import Metrics
from llama_adapter.app.serving.online.base import CANCELLED
from llama_adapter.runtime.terminal.logs import FIELDS

_access_log = logging.getLogger("llama_adapter.access")
_error_log = logging.getLogger("llama_adapter.server")
_IN_TEXT = ("client", "key", "model", "error", "path")
_MOST_CHARACTERS = 200
VISIT = "llama_adapter.visit"  # the key in a request's ASGI scope that holds its `Visit`
INTERNAL_ERROR = ApiError("Internal server error; see the server's log.", status=500, code="internal_error")


@dataclass(slots=True)
class Visit:
    """The facts that the log has about one HTTP request."""

    id: str = field(default_factory=lambda: f"req_{uuid.uuid4().hex}")
    status: int = 0  # 0: nothing was sent yet
    is_left: bool = False  # the client has hung up
    prompt_tokens: int = 0
    completion_tokens: int = 0
    key: str = ""  # the name of the API key
    model: str = ""
    error: str = ""  # the code of an error


def visit_of(scope: Scope) -> Visit:
    """The visit of a request."""
    visit: Visit = scope[VISIT]
    return visit


class RootPath:
    """Accepts paths with and without the prefix of a proxy, whether the proxy removes it or not."""

    def __init__(self, app: ASGIApp, *, root_path: str) -> None:
        self.app, self._root = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "path" in scope:
            path = str(scope["path"])
            if path == self._root:  # the page's relative addresses need the slash
                return await RedirectResponse(f"{path}/")(scope, receive, send)
            is_whole = path.startswith(f"{self._root}/")
            scope = {**scope, "root_path": self._root, "path": path if is_whole else self._root + path}
        await self.app(scope, receive, send)


class AccessLog:
    """Gives every request an `x-request-id`, logs and counts it, and answers 500 if the application raises."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, paths: Container[str]) -> None:
        """`paths` are logged as they are. Other paths may hold text of the client: their route's pattern is logged."""
        self.app = app
        self._metrics, self._paths = metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        visit = scope[VISIT] = Visit()
        started = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = visit.id
                visit.error = headers.get(ERROR_CODE, "")
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server ends, and the request had not arrived
            visit.is_left = visit.status > 0
            if not visit.is_left:
                await of_answer(CANCELLED).response()(scope, receive, send_with_id)
        except Exception as error:
            is_stalled = isinstance(error, TimeoutError) and visit.status > 0  # see `AnswerResponse`
            if is_stalled or isinstance(error, ClientDisconnect):
                visit.is_left = True
                return
            _error_log.error("%s, %s", kind_and_place(error), visit.id)
            if not visit.status:  # otherwise the server closes the connection
                await INTERNAL_ERROR.response()(scope, receive, send_with_id)
        finally:
            self._log(scope, visit, elapsed_ms=(time.perf_counter() - started) * 1e3)

    def _log(self, scope: Scope, visit: Visit, *, elapsed_ms: float) -> None:
        route = self._route(scope)
        method = scope["method"] if scope["method"].isalpha() and len(scope["method"]) < 10 else "other"
        status = CLIENT_GONE if visit.is_left or not visit.status else visit.status
        self._metrics.http_request(method=method, route=route, status=status)
        fields = {
            "method": method,
            "route": route,
            "status": status,
            "ms": round(elapsed_ms, 1),
            "prompt_tokens": visit.prompt_tokens,
            "completion_tokens": visit.completion_tokens,
            "request_id": visit.id,
            "client": (scope.get("client") or ("",))[0],
            # The word of the client, or of a proxy.
            "forwarded_for": Headers(scope=scope).get("x-forwarded-for", "")[:_MOST_CHARACTERS],
            "key": visit.key,
            "model": visit.model,
            "error": visit.error,
            "path": path_of(scope)[:_MOST_CHARACTERS] if status == 404 and route == "other" else "",
        }
        fields = {name: value for name, value in fields.items() if value != ""}
        more = "".join(f", {name} {fields[name]}" for name in _IN_TEXT if name in fields)
        level = logging.DEBUG if route == "other" and status < 400 else logging.INFO  # of the page, which polls
        _access_log.log(
            level,
            "%s %s %d %.0f ms, %d+%d tokens, %s%s",
            *(method, route, status, elapsed_ms, visit.prompt_tokens, visit.completion_tokens, visit.id, more),
            extra={FIELDS: fields},
        )

    def _route(self, scope: Scope) -> str:
        if path_of(scope) in self._paths:  # needs no route: a guard may have answered before routing
            return path_of(scope)
        return getattr(scope.get("route"), "path", "") or "other"


def kind_and_place(error: Exception) -> str:
    """The type, the system's reason and the innermost three frames. Messages are left out: they may quote requests."""
    places = traceback.extract_tb(error.__traceback__)[-3:]
    shown = " < ".join(f"{place.name} ({place.filename}:{place.lineno})" for place in reversed(places))
    reason = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
    return f"{type(error).__name__}{reason} in {shown}"
