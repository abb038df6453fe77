"""A light HTTP client for one kind of request, which takes little processor time from a server on the same machine."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any, Literal, Self

Outcome = Literal[
    "answered",  # status 200, complete
    "refused",  # another status, complete
    "not_accepted",  # no connection, or closed before the first byte of an answer
    "broken",  # closed in the middle of an answer
    "hung",  # no answer within the timeout
]
MAX_LINE = 2**20
CHAT = "/v1/chat/completions"


@dataclass(kw_only=True, slots=True)
class Reply:
    """The result of one request; times are seconds since it was sent."""

    outcome: Outcome
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    code: str = ""  # of the error
    first_token_s: float = 0.0
    total_s: float = 0.0
    started: float = 0.0  # by `time.perf_counter()`


class Connection:
    """One keep-alive connection, for one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, host: str) -> None:
        self._reader, self._writer, self._host = reader, writer, host
        self.is_open = True

    @classmethod
    async def open(cls, host: str, port: int) -> Self:
        """Connect; raises OSError."""
        reader, writer = await asyncio.open_connection(host, port, limit=MAX_LINE)
        return cls(reader, writer, host=f"{host}:{port}")

    async def close(self) -> None:
        """Close the connection; repeated calls do nothing."""
        self.is_open = False
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return

    async def ask(self, body: bytes, *, timeout_s: float) -> Reply:
        """Send a chat request and read its whole answer; never raises."""
        reply = Reply(outcome="not_accepted", started=time.perf_counter())
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(body)
                await self._read(reply)
        except TimeoutError:
            reply.outcome = "hung"
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            reply.outcome = "broken" if reply.status else "not_accepted"
        reply.total_s = time.perf_counter() - reply.started
        if reply.outcome not in ("answered", "refused") or reply.headers.get("connection") == "close":
            await self.close()
        return reply

    async def _send(self, body: bytes) -> None:
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: {self._host}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode("ascii") + body)
        await self._writer.drain()

    async def _read(self, reply: Reply) -> None:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        lines = head.split("\r\n")
        reply.status = int(lines[0].split(" ")[1])
        for line in filter(None, lines[1:]):
            name, _, value = line.partition(":")
            reply.headers[name.lower()] = value.strip().lower()
        if reply.headers.get("transfer-encoding") == "chunked":
            await self._read_stream(reply)
            return
        body = json.loads(await self._reader.readexactly(int(reply.headers["content-length"])))
        _take_whole(body, reply)

    async def _read_stream(self, reply: Reply) -> None:
        is_done, rest = False, b""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            rest += (await self._reader.readexactly(size + 2))[:-2]
            *events, rest = rest.split(b"\n\n")
            for event in events:
                data = event.removeprefix(b"data: ")
                is_done = is_done or data == b"[DONE]"
                if not is_done:
                    _take_chunk(json.loads(data), reply)
        await self._reader.readexactly(2)
        if not is_done and not reply.code:
            raise ValueError("a stream without its end")
        reply.outcome = "refused" if reply.code else "answered"


def _take_whole(body: dict[str, Any], reply: Reply) -> None:
    if reply.status != 200:
        reply.outcome, reply.code = "refused", str(body["error"]["code"])
        return
    (choice,) = body["choices"]
    reply.outcome, reply.text = "answered", choice["message"]["content"]


def _take_chunk(chunk: dict[str, Any], reply: Reply) -> None:
    if "error" in chunk:
        reply.code = str(chunk["error"]["code"])
        return
    for choice in chunk["choices"]:
        text = choice["delta"].get("content") or ""
        if text and not reply.text:
            reply.first_token_s = time.perf_counter() - reply.started
        reply.text += text


async def ask_once(host: str, port: int, body: bytes, *, timeout_s: float) -> Reply:
    """Send one request over a new connection; never raises."""
    started = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            connection = await Connection.open(host, port)
    except (OSError, TimeoutError):
        return Reply(outcome="not_accepted", started=started, total_s=time.perf_counter() - started)
    try:
        return await connection.ask(body, timeout_s=timeout_s)
    finally:
        await connection.close()
