"""One HTTP exchange over a plain socket, so that invalid requests can be sent."""

import json
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

CHAT = "/v1/chat/completions"
PIECE = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanged:
    """The answer; status 0 and an empty code if there was none."""

    status: int
    code: str  # of the error
    message: str
    ms: float


def request_head(
    *, path: str = CHAT, method: str = "POST", length: int | None = None, headers: Mapping[str, str] | None = None
) -> bytes:
    """The head of a request; headers with an empty value are left out."""
    named = {"host": "localhost", "content-type": "application/json", "connection": "close"}
    named |= {} if length is None else {"content-length": str(length)}
    named |= headers or {}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items() if value)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def exchange(host: str, port: int, pieces: Iterable[bytes], *, timeout_s: float = 120.0) -> Exchanged:
    """Send the pieces of a request and read its answer."""
    started = time.perf_counter()
    received = b""
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        # The server may answer and close the connection while the request is still being sent.
        with suppress(BrokenPipeError, ConnectionResetError):
            for piece in pieces:
                for start in range(0, len(piece), PIECE):
                    connection.sendall(memoryview(piece)[start : start + PIECE])
        with suppress(ConnectionResetError):
            while more := connection.recv(65536):
                received += more
    return _read(received, ms=(time.perf_counter() - started) * 1e3)


def _read(received: bytes, *, ms: float) -> Exchanged:
    head, _, body = received.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    error: dict[str, str] = {}
    with suppress(ValueError, KeyError, TypeError):
        error = json.loads(body)["error"]
    return Exchanged(status=status, code=error.get("code", ""), message=error.get("message", ""), ms=ms)
