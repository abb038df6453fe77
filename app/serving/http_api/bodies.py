"""Limits of request bodies (size, complexity, time, memory), and refusals sent before the application runs."""

import asyncio
import codecs
import json
from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, Final

import pydantic_core
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llama_adapter.app.serving.http_api.errors import ApiError

# A client that is still sending when its connection closes may miss the answer, so its bytes are read and discarded.
MAX_DISCARDED_BYTES: Final = 256 * 2**20
DISCARD_S: Final = 5.0
_SEPARATORS: Final = (b",", b"[", b"{")


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send, *, is_body_read: bool = False) -> None:
    """Answer instead of the application. An unread body is discarded, and its connection closed."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    if is_body_read or not _has_body(scope):
        await error.response()(scope, receive, send)
        return
    response = error.response()
    response.headers["connection"] = "close"
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    # A client that expects "100 Continue" has not sent its body yet; a client that was too slow gets no more time.
    if error.http_status != 408 and "expect" not in Headers(scope=scope):
        await _discard(receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def path_of(scope: Scope) -> str:
    """The path of a request below the root path of its application."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def num_separators(text: bytes) -> int:
    """Commas and opening brackets."""
    return sum(map(text.count, _SEPARATORS))


def parse_json(text: bytes) -> Any:
    """Strict JSON: UTF-8, valid Unicode, finite numbers; a byte order mark is ignored. Raises json.JSONDecodeError."""
    try:
        return pydantic_core.from_json(text.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False, cache_strings=False)
    except ValueError:
        raise json.JSONDecodeError("invalid JSON", "", 0) from None


class BodyLimit:
    """Reads bodies of requests below `prefix` into memory before the application runs.

    Answers:
        415: the body is compressed.
        413: the body has more than `max_bytes`, whether Content-Length says so or not.
        408: the body takes more than `timeout_s` seconds.
        503: the bodies of all unanswered requests hold more than `max_bytes_under_way`.
        400: the body has more than `max_separators` commas and opening brackets. Three bytes of JSON can take a hundred
            bytes of memory.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        prefix: str | tuple[str, ...],
        max_bytes: int,
        max_bytes_under_way: int,
        timeout_s: float,
        max_separators: int,
        unread: Container[str] = (),
    ) -> None:
        """Requests to the paths `unread` are left to the application, which limits their bodies itself."""
        self.app, self._unread = app, unread
        self._prefix, self._max_bytes, self._timeout_s = prefix, max_bytes, timeout_s
        self._max_bytes_under_way, self._max_separators = max_bytes_under_way, max_separators
        self._bytes_under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not path_of(scope).startswith(self._prefix):
            return await self.app(scope, receive, send)
        if Headers(scope=scope).get("content-encoding", "identity").lower() != "identity":
            message = "Compressed request bodies are not read: send the body without Content-Encoding."
            headers = {"accept-encoding": "identity"}
            refusal = ApiError(message, status=415, code="unsupported_encoding", headers=headers)
            return await refuse(refusal, scope, receive, send)
        if path_of(scope) in self._unread:
            return await self.app(scope, receive, send)
        if _announced_bytes(scope) > self._max_bytes:
            return await refuse(self._too_large(), scope, receive, send)
        body = _Body()
        try:
            error = await self._read(body, receive)
            if error is None and not body.is_disconnected:
                await self.app(scope, body.replay(receive), send)
        finally:
            # Pictures decoded from the body live as long as the request.
            self._bytes_under_way -= body.num_bytes
        if error is not None:
            body.pieces.clear()
            await refuse(error, scope, receive, send, is_body_read=body.is_whole)

    async def _read(self, body: "_Body", receive: Receive) -> ApiError | None:
        found = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while not body.is_whole and not body.is_disconnected:
                    piece = body.take(await receive())
                    self._bytes_under_way += len(piece)
                    if body.num_bytes > self._max_bytes:
                        return self._too_large()
                    if piece and self._bytes_under_way > self._max_bytes_under_way:
                        message = "The unanswered requests fill the memory reserved for them: try again in a moment."
                        return ApiError(message, status=503, code="overloaded", headers={"retry-after": "1"})
                    found += num_separators(piece)
                    if found > self._max_separators:
                        message = f"The request has more than {self._max_separators:,} commas and opening brackets."
                        return ApiError(message, code="request_too_complex")
        except TimeoutError:
            message = f"The request body did not arrive within {self._timeout_s:g} seconds."
            return ApiError(message, status=408, code="request_timeout")
        return None

    def _too_large(self) -> ApiError:
        message = f"The request is larger than {self._max_bytes:,} bytes: send a smaller picture."
        return ApiError(message, status=413, code="request_too_large")


@dataclass(slots=True)
class _Body:
    """A request's body, piece by piece."""

    pieces: deque[bytes] = field(default_factory=deque)
    num_bytes: int = 0
    is_whole: bool = False
    is_disconnected: bool = False

    def take(self, message: Message) -> bytes:
        """Keep the next message; returns its bytes."""
        if message["type"] != "http.request":
            self.is_disconnected = True
            return b""
        piece: bytes = message.get("body", b"")
        if piece:
            self.pieces.append(piece)
        self.num_bytes += len(piece)
        self.is_whole = not message.get("more_body", False)
        return piece

    def replay(self, receive: Receive) -> Receive:
        """What the application receives: the body without keeping a copy, then the messages of `receive`."""
        is_over = False

        async def receive_again() -> Message:
            nonlocal is_over
            if is_over:
                return await receive()
            piece = self.pieces.popleft() if self.pieces else b""
            is_over = not self.pieces
            return {"type": "http.request", "body": piece, "more_body": not is_over}

        return receive_again


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != ""


def _announced_bytes(scope: Scope) -> int:
    length = Headers(scope=scope).get("content-length", "")
    return int(length) if length.isdecimal() and length.isascii() and len(length) < 20 else 0


async def _discard(receive: Receive) -> None:
    num_bytes = 0
    try:
        async with asyncio.timeout(DISCARD_S):
            while num_bytes < MAX_DISCARDED_BYTES:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
                num_bytes += len(message.get("body", b""))
    except TimeoutError:
        return
