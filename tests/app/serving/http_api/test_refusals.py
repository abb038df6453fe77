"""Requests that a running server must refuse: each gets its status and code, and the next request is answered."""

import json
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import httpx
import pytest

from llama_adapter.app.serving.online.types import ServiceLimits
from tests import bad_files
from tests.app.serving.http_api import requests
from tests.app.serving.http_api.requests import CHAT, RED_STAR, data_uri, image, user
from tests.app.serving.http_api.site import COMMAND, HOSTS, PATHS, SITE, RedirectingSite
from tests.app.serving.server_process import ServerProcess

pytestmark = pytest.mark.slow

_PIECE = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One request. `pieces` creates it, so that large requests exist only while they are sent."""

    name: str
    pieces: Callable[[], Iterable[bytes]]
    status: int
    code: str


def chat(url: str, *, prompt: str = "What is it?") -> bytes:
    return json.dumps(requests.chat(user(prompt, image(url)))).encode()


def _of_body(name: str, body: Callable[[], bytes], status: int, code: str, **headers: str) -> Case:
    def pieces() -> list[bytes]:
        content = body()
        return [request_head(content_length=str(len(content)), **headers), content]

    return Case(name=name, pieces=pieces, status=status, code=code)


def _of_file(name: str, content: Callable[[], bytes], code: str, *, kind: str = "png", status: int = 400) -> Case:
    return _of_body(name, lambda: chat(data_uri(content(), kind=kind)), status, code)


def _of_url(name: str, url: str, code: str, *, status: int = 400) -> Case:
    return _of_body(name, lambda: chat(url), status, code)


def host_flags(port: int) -> list[str]:
    hosts = (f"http://{name}:{port}" for name in (SITE, *HOSTS))
    return [flag for host in hosts for flag in ("--allow-url-host", host)]


def _endless_chunks() -> Iterator[bytes]:
    yield request_head(transfer_encoding="chunked")
    piece = b"A" * 2**20
    for _ in range(127):
        yield b"%x\r\n" % len(piece) + piece + b"\r\n"
    yield b"0\r\n\r\n"


def all_cases(port: int) -> list[Case]:
    """All cases; `port` is that of the site with redirects."""
    picture, large = data_uri(b"bytes"), ServiceLimits().max_picture_bytes + 1
    return [
        _of_file("PNG bomb, 30,000 x 30,000 pixels in 110 kB", bad_files.png_bomb, "too_large"),
        _of_file("half a JPEG", bad_files.truncated_jpeg, "truncated", kind="jpeg"),
        _of_file("HTML that says it is a PNG", lambda: bad_files.HTML, "not_a_picture"),
        _of_file("SVG that names a file", lambda: bad_files.SVG, "unsupported", kind="svg+xml"),
        _of_file("picture of no bytes", bytes, "empty_image_file"),
        _of_file("43 MB of base64", lambda: bytes(large), "image_file_too_large", status=413),
        _of_url("base64 that is damaged", "data:image/png;base64,AA*A", "invalid_base64_image"),
        _of_url("name of a file", "/etc/passwd", "invalid_image_url"),
        _of_url("private address", "http://169.254.169.254/", "invalid_image_url"),
        _of_url("private address, written as a number", "http://2130706433/", "invalid_image_url"),
        _of_url("allowed host as a user", "https://pictures.test@evil.test/", "invalid_image_url"),
        _of_url("another host", "https://pictures.test.evil.test/a.png", "image_host_not_allowed"),
        *(_of_url(f"allowed host {name}", f"http://{name}:{port}/", code) for name, (_, code) in HOSTS.items()),
        *(_of_url(f"allowed host {path}", f"http://{SITE}:{port}{path}", code) for path, (_, code) in PATHS.items()),
        _of_url("allowed host, 4 GiB", f"http://{SITE}:{port}/endless", "image_file_too_large", status=413),
        _of_body("133 MB", lambda: b"A" * 133_000_000, 413, "request_too_large"),
        Case(name="the same in chunks", pieces=_endless_chunks, status=413, code="request_too_large"),
        _of_body("prompt of 100,000 words", lambda: chat(picture, prompt="word " * 100_000), 400, "invalid_value"),
        _of_body("JSON nested 100,000 deep", lambda: b"[" * 100_000 + b"]" * 100_000, 400, "request_too_complex"),
        _of_body("half a JSON", lambda: chat(picture)[:-2], 400, "invalid_json"),
        _of_body("form", lambda: chat(picture), 415, "unsupported_media_type", content_type="text/plain"),
        _of_body("another name of this machine", lambda: chat(picture), 421, "host_not_allowed", host="evil.test"),
    ]


class Exchanged(NamedTuple):
    """The answer; status 0 and an empty code if there was none."""

    status: int
    code: str  # of the error
    message: str


def request_head(**headers: str) -> bytes:
    """The head of a chat request. `headers` have underscores for hyphens."""
    named = {"host": "localhost", "content_type": "application/json", "connection": "close", **headers}
    lines = [f"POST {CHAT} HTTP/1.1", *(f"{name.replace('_', '-')}: {value}" for name, value in named.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def exchange(host: str, port: int, pieces: Iterable[bytes], *, timeout_s: float = 120.0) -> Exchanged:
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


CASES = [pytest.param(number, id=case.name) for number, case in enumerate(all_cases(0))]


@pytest.fixture(scope="module")
def site() -> Iterator[RedirectingSite]:
    with RedirectingSite() as site:
        yield site


@pytest.fixture(scope="module")
def server(site: RedirectingSite) -> Iterator[ServerProcess]:
    with ServerProcess(*host_flags(site.port), command=COMMAND) as server:
        yield server


@pytest.mark.parametrize("number", CASES)
def test_a_bad_request_is_refused_as_it_should_be(site: RedirectingSite, server: ServerProcess, number: int) -> None:
    case = all_cases(site.port)[number]

    came = exchange(server.host, server.port, case.pieces())

    assert (came.status, came.code) == (case.status, case.code)
    assert came.message
    assert "Traceback" not in came.message


def test_good_requests_are_answered_after_all_of_them(server: ServerProcess) -> None:
    question = requests.chat(user(image(data_uri(RED_STAR.read_bytes())), "What color is the star?"))
    for _ in range(8):
        reply = httpx.post(f"{server.url}{CHAT}", json=question, timeout=60, trust_env=False, verify=False)
        assert (reply.status_code, reply.json()["choices"][0]["message"]["content"]) == (200, "red")


def test_nothing_of_the_requests_is_in_the_log(server: ServerProcess) -> None:
    # Codes of errors, and paths where nothing is served, are in the log.
    said = re.sub(r", error \w+(, path \S+)?", "", "\n".join(server.lines))

    for private in ("passwd", "evil.test", "meta-data", "base64", "script", "word word"):
        assert private not in said
    assert "Traceback" not in said
