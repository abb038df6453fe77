"""Request bodies within limits of size, time and memory, and refusals of requests whose body is not wanted."""

import asyncio
import json
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# A client that still sends when its connection is closed may lose the answer. So what it sends is thrown away first.
MAX_DISCARDED_BYTES: Final = 256 * 2**20
DISCARD_S: Final = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """An answer in the place of the application's, in OpenAI's form of an error."""

    status: int
    code: str
    message: str
    kind: str = "invalid_request_error"  # OpenAI's `type`
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def body(self) -> bytes:
        """The JSON of the answer."""
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.code}
        return json.dumps({"error": error}).encode()


async def refuse(refusal: Refusal, scope: Scope, receive: Receive, send: Send, *, is_body_read: bool = False) -> None:
    """Answer in the application's place; a body that was not read is discarded, and its connection closed."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    is_body_read = is_body_read or not has_body(scope)
    body = refusal.body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode("ascii")),
        *refusal.headers,
        *([] if is_body_read else [(b"connection", b"close")]),
    ]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": not is_body_read})
    if not is_body_read:
        # Whoever asks first whether to send has not begun, and must not be told to. Whoever is slow has no time left.
        if refusal.status != 408 and not any(key == b"expect" for key, _ in scope["headers"]):
            await _discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def has_body(scope: Scope) -> bool:
    """Whether the head of a request announces a body."""
    headers = {key: value for key, value in scope["headers"] if key in (b"content-length", b"transfer-encoding")}
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip(b"0") != b""


class BodyLimit:
    """Reads the bodies of requests under `prefix` before the application runs, which then reads them from memory.

    413 for one that is too large, by its head or while it comes; 408 for one that is too slow; 503 while the bodies
    of all requests under way together are too much for the memory.
    """

    def __init__(
        self, app: ASGIApp, *, prefix: str | tuple[str, ...], max_bytes: int, max_bytes_under_way: int, timeout_s: float
    ) -> None:
        self.app = app
        self._prefix, self._max_bytes, self._timeout_s = prefix, max_bytes, timeout_s
        self._max_bytes_under_way = max_bytes_under_way
        self._bytes_under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not str(scope["path"]).startswith(self._prefix):
            return await self.app(scope, receive, send)
        if (announced := _announced_bytes(scope)) is not None and announced > self._max_bytes:
            return await refuse(self._too_large(), scope, receive, send)
        body = _Body()
        try:
            refusal = await self._read(body, receive)
            if refusal is not None:
                self._bytes_under_way -= body.forget()
                await refuse(refusal, scope, receive, send, is_body_read=body.is_whole)
            elif not body.is_disconnected:
                await self.app(scope, body.replay(receive), send)
        finally:
            # The pictures inside live as long as the request does.
            self._bytes_under_way -= body.num_bytes

    async def _read(self, body: "_Body", receive: Receive) -> Refusal | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                while not body.is_whole and not body.is_disconnected:
                    num_new = body.take(await receive())
                    self._bytes_under_way += num_new
                    if body.num_bytes > self._max_bytes:
                        return self._too_large()
                    if num_new and self._bytes_under_way > self._max_bytes_under_way:
                        return _NO_ROOM
        except TimeoutError:
            return Refusal(
                status=408,
                code="request_timeout",
                message=f"The body of this request did not come within {self._timeout_s:g} seconds.",
            )
        return None

    def _too_large(self) -> Refusal:
        return Refusal(
            status=413,
            code="request_too_large",
            message=f"A request has at most {self._max_bytes:,} bytes here: send less, such as a smaller picture.",
        )


_NO_ROOM: Final = Refusal(
    status=503,
    code="overloaded",
    kind="server_error",
    message="The requests under way fill the memory that is meant for them: try again in a moment.",
    headers=((b"retry-after", b"1"),),
)


class _Body:
    """A request's body as it came, piece by piece."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self.num_bytes = 0
        self.is_whole = False
        self.is_disconnected = False

    def take(self, message: Message) -> int:
        """Keep the next message; returns how many bytes came."""
        if message["type"] != "http.request":
            self.is_disconnected = True
            return 0
        piece: bytes = message.get("body", b"")
        if piece:
            self._pieces.append(piece)
        self.num_bytes += len(piece)
        self.is_whole = not message.get("more_body", False)
        return len(piece)

    def forget(self) -> int:
        """Give up what came; returns how many bytes it was."""
        num_bytes, self.num_bytes = self.num_bytes, 0
        self._pieces.clear()
        return num_bytes

    def replay(self, receive: Receive) -> Receive:
        """What the application receives: the body, each piece given away, and then what comes from outside."""
        is_over = False

        async def receive_again() -> Message:
            nonlocal is_over
            if is_over:
                return await receive()
            piece = self._pieces.popleft() if self._pieces else b""
            is_over = not self._pieces
            message: dict[str, Any] = {"type": "http.request", "body": piece, "more_body": not is_over}
            return message

        return receive_again


def _announced_bytes(scope: Scope) -> int | None:
    lengths = [value for key, value in scope["headers"] if key == b"content-length"]
    return int(lengths[0]) if lengths and lengths[0].isdigit() and len(lengths[0]) < 20 else None


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
