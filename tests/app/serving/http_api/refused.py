"""Invalid requests, each with the expected status and code, and an exchange over a plain socket that sends them."""

import base64
import json
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from llama_adapter.app.serving.online.types import ServiceLimits
from scripts.service_bench.client import CHAT
from tests import bad_files
from tests.app.serving.http_api.site import HOSTS, PATHS, SITE

_PIECE = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One request. `pieces` creates it, so that large requests exist only while they are sent."""

    name: str
    pieces: Callable[[], Iterable[bytes]]
    status: int
    code: str


def chat(url: str | None = None, *, prompt: str = "What is it?", **parameters: Any) -> bytes:
    """The body of a chat request about one picture."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": prompt}]
    if url is not None:
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return json.dumps({"model": "default", "messages": [{"role": "user", "content": parts}], **parameters}).encode()


def data_uri(content: bytes, *, media_type: str = "image/png") -> str:
    """A picture as a data URI."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode('ascii')}"


def posted(body: bytes, **headers: str) -> list[bytes]:
    """A complete request."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return [request_head(length=len(body), headers=named), body]


def _of_body(name: str, body: Callable[[], bytes], status: int, code: str, **headers: str) -> Case:
    return Case(name=name, pieces=lambda: posted(body(), **headers), status=status, code=code)


def _of_file(name: str, content: Callable[[], bytes], code: str, *, media_type: str = "image/png") -> Case:
    return _of_body(name, lambda: chat(data_uri(content(), media_type=media_type)), 400, code)


def _of_url(name: str, url: str, code: str) -> Case:
    return _of_body(name, lambda: chat(url), 400, code)


def picture_cases() -> Iterator[Case]:
    """Pictures that cannot be decoded, or are too large to decode."""
    yield _of_file("PNG bomb, 30,000 x 30,000 pixels in 110 kB", bad_files.png_bomb, "too_large")
    yield _of_file(
        "JPEG header of 200 megapixels", lambda: bad_files.jpeg_header(width=20_000, height=10_000), "too_large"
    )
    yield _of_file("GIF of one pixel, its frame of 65,535 x 65,535", bad_files.large_gif_frame, "too_large")
    yield _of_file("half a JPEG", bad_files.truncated_jpeg, "truncated", media_type="image/jpeg")
    yield _of_file("HTML that says it is a PNG", lambda: bad_files.HTML, "not_a_picture")
    yield _of_file("zip bomb that says it is a PNG", bad_files.zip_bomb, "not_a_picture")
    yield _of_file("SVG that names a file", lambda: bad_files.SVG, "unsupported", media_type="image/svg+xml")
    yield _of_file("picture of no bytes", bytes, "empty_image_file")
    yield _of_url("base64 that is damaged", "data:image/png;base64,AA*A", "invalid_base64_image")
    size = ServiceLimits().max_picture_bytes + 1
    yield _of_body(
        "picture of a byte more than a file may have (43 MB of base64)",
        lambda: chat(data_uri(bytes(size))),
        413,
        "image_file_too_large",
    )


def url_cases() -> Iterator[Case]:
    """Addresses that must not be requested, written in deceptive ways."""
    for url in ("file:///etc/passwd", "/etc/passwd", "../../etc/passwd", "ftp://example.com/a.png"):
        yield _of_url(f"`{url}`", url, "invalid_image_url")
    for host in ("127.0.0.1", "169.254.169.254", "2130706433", "0x7f.1", "0177.0.0.1", "[::1]", "[::ffff:10.0.0.1]"):
        yield _of_url(f"`http://{host}/`", f"http://{host}/", "invalid_image_url")
    for url in ("http://localhost/", "https://example.com/a.png", "https://pictures.test.evil.test/a.png"):
        yield _of_url(f"`{url}`", url, "image_host_not_allowed")
    yield _of_url("`https://pictures.test@evil.test/`", "https://pictures.test@evil.test/", "invalid_image_url")


def remote_cases(port: int) -> Iterator[Case]:
    """Pictures on the allowed site at `port` (`site.py`)."""
    for name, (_, reason, code) in HOSTS.items():
        yield _of_url(f"allowed host, {reason}", f"http://{name}:{port}/", code)
    for path, (_, reason, code) in PATHS.items():
        yield _of_url(f"allowed host, {reason}", f"http://{SITE}:{port}{path}", code)
    endless = f"http://{SITE}:{port}/endless"
    name = "allowed host, a picture of 4 GiB, its length not told"
    yield _of_body(name, lambda: chat(endless), 413, "image_file_too_large")


def host_flags(port: int) -> list[str]:
    """The flags `--allow-url-host` of a server for these cases."""
    hosts = (f"http://{name}:{port}" for name in (SITE, *HOSTS))
    return [flag for host in hosts for flag in ("--allow-url-host", host)]


def body_cases() -> Iterator[Case]:
    """Requests that are rejected before any picture is read."""
    picture = data_uri(b"bytes")
    yield _of_body(
        "133 MB of base64", lambda: chat("data:image/png;base64," + "A" * 133_000_000), 413, "request_too_large"
    )
    yield Case(
        name="the same in chunks, its length not told", pieces=_endless_chunks, status=413, code="request_too_large"
    )
    yield _of_body("prompt of 100,000 words", lambda: chat(picture, prompt="word " * 100_000), 400, "invalid_value")
    yield _of_body("JSON nested 100,000 deep", lambda: b"[" * 100_000 + b"]" * 100_000, 400, "request_too_complex")
    yield _of_body(
        "JSON of 26 million brackets", lambda: b"[" + b"[]," * 13_000_000 + b"0]", 400, "request_too_complex"
    )
    yield _of_body(
        "number of 4 million digits",
        lambda: chat(picture)[:-1] + b', "seed": ' + b"9" * 4_000_000 + b"}",
        400,
        "invalid_json",
    )
    yield _of_body("half a JSON", lambda: chat(picture)[:-2], 400, "invalid_json")
    yield _of_body("bytes that are no UTF-8", lambda: b'{"model": "\xff"}', 400, "invalid_json")
    yield _of_body("no body", bytes, 400, "invalid_json")
    yield _of_body(
        "form of another site", lambda: chat(picture), 415, "unsupported_media_type", content_type="text/plain"
    )
    yield _of_body(
        "another site's name for this machine", lambda: chat(picture), 421, "host_not_allowed", host="evil.test"
    )


def _endless_chunks() -> Iterator[bytes]:
    yield request_head(headers={"transfer-encoding": "chunked"})
    piece = b"A" * 2**20
    for _ in range(127):
        yield b"%x\r\n" % len(piece) + piece + b"\r\n"
    yield b"0\r\n\r\n"


def all_cases(port: int) -> list[Case]:
    """All cases; `port` is that of the site with redirects."""
    return [*picture_cases(), *url_cases(), *remote_cases(port), *body_cases()]


class Exchanged(NamedTuple):
    """The answer; status 0 and an empty code if there was none."""

    status: int
    code: str  # of the error
    message: str


def request_head(*, length: int | None = None, headers: Mapping[str, str] | None = None) -> bytes:
    """The head of a chat request; headers with an empty value are left out."""
    named = {"host": "localhost", "content-type": "application/json", "connection": "close"}
    named |= {} if length is None else {"content-length": str(length)}
    named |= headers or {}
    lines = [f"POST {CHAT} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items() if value)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def exchange(host: str, port: int, pieces: Iterable[bytes], *, timeout_s: float = 120.0) -> Exchanged:
    """Send the pieces of a request and read its answer."""
    received = b""
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        # The server may answer and close the connection while the request is still being sent.
        with suppress(BrokenPipeError, ConnectionResetError):
            for piece in pieces:
                for start in range(0, len(piece), _PIECE):
                    connection.sendall(memoryview(piece)[start : start + _PIECE])
        with suppress(ConnectionResetError):
            while more := connection.recv(65536):
                received += more
    head, _, body = received.partition(b"\r\n\r\n")
    status = re.match(rb"\S+ (\d+)", head)
    error: dict[str, str] = {}
    with suppress(ValueError, KeyError, TypeError):
        error = json.loads(body)["error"]
    return Exchanged(int(status[1]) if status else 0, error.get("code", ""), error.get("message", ""))
