"""One request to an ASGI application without a socket, message by message."""

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.app.serving.http_api.requests import CHAT


class Application:
    """Answers 200 with the request's body and these headers, and records the body."""

    def __init__(self, **headers: str) -> None:
        self.headers = _raw(headers)
        self.bodies: list[bytes] = []
        self.clients: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        self.bodies.append(body)
        self.clients.append(scope.get("state", {}).get("client", ""))
        await send({"type": "http.response.start", "status": 200, "headers": self.headers})
        await send({"type": "http.response.body", "body": body})


class Client:
    """One request and, after `ask`, its response."""

    def __init__(
        self,
        *pieces: bytes,
        path: str = CHAT,
        root_path: str = "",
        method: str = "POST",
        kind: str = "http",
        client: tuple[str, int] | None = ("127.0.0.1", 5000),
        is_whole: bool = True,
        hangs_up: bool = False,
        **headers: str,
    ) -> None:
        """`headers` have underscores for hyphens; those without a value are left out."""
        self.scope: Scope = {
            "type": kind,
            "path": path,
            "root_path": root_path,
            "query_string": b"",
            "method": method,
            "client": client,
            "headers": _raw({"host": "localhost:8000", "content_type": "application/json", **headers}),
        }
        last = len(pieces) - 1
        self.messages: list[Message] = [
            {"type": "http.request", "body": piece, "more_body": not is_whole or index < last}
            for index, piece in enumerate(pieces or (b"",))
        ]
        if hangs_up:
            self.messages.append({"type": "http.disconnect"})
        self.num_received = 0
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        if self.num_received < len(self.messages):
            self.num_received += 1
            return self.messages[self.num_received - 1]
        await asyncio.get_running_loop().create_future()  # nothing more is received
        raise AssertionError

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    def ask(self, app: ASGIApp) -> "Client":
        async def ask() -> None:
            asking = asyncio.create_task(self.asking(app))
            assert (await asyncio.wait({asking}, timeout=60))[0], "the application does not end"
            await asking

        asyncio.run(ask())
        return self

    async def asking(self, app: ASGIApp) -> None:
        await app(self.scope, self.receive, self.send)

    @property
    def status(self) -> int:
        assert [message["type"] for message in self.sent[:1]] == ["http.response.start"]
        assert [message.get("more_body", False) for message in self.sent[1:]][-1] is False
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def error(self) -> dict[str, Any]:
        body = b"".join(message.get("body", b"") for message in self.sent[1:])
        assert self.headers["content-type"] == "application/json"
        assert self.headers["content-length"] == str(len(body))
        (error,) = json.loads(body).values()
        assert set(error) == {"message", "type", "param", "code"}
        return dict(error)


def _raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items() if value]
