"""The load on a service: what the benchmark counts. Speed is not tested."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest

from scripts import bench_service
from scripts.pages.render import read
from scripts.service_bench.client import Reply, ask_once
from scripts.service_bench.questions import CAPTION, Question, Workload

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*events: object) -> bytes:
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    pieces = [f"data: {text}\n\n".encode() for text in texts]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


def whole(content: dict[str, Any], *, status: str = "200 OK", more: str = "") -> bytes:
    body = json.dumps(content).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


def asked(page: bytes | None, *, timeout_s: float = 20.0) -> Reply:
    """The client's reply from a server that sends `page` and disconnects.

    With None, the server sends nothing and waits.
    """

    async def run() -> Reply:
        handlers: list[asyncio.Task[Any]] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            handlers.append(asyncio.current_task())  # type: ignore[arg-type]
            await reader.readuntil(b"the body")
            if page is None:
                await reader.read()
            else:
                writer.write(page)
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            return await ask_once("127.0.0.1", server.sockets[0].getsockname()[1], b"the body", timeout_s=timeout_s)
        finally:
            server.close()
            await server.wait_closed()
            await asyncio.gather(*handlers, return_exceptions=True)

    return asyncio.run(run())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_answers(is_streamed: bool) -> None:
    deltas = (delta(""), delta("a "), delta("star"), delta(""), {"choices": [], "usage": {}}, "[DONE]")
    streamed = STREAM_HEAD + chunked(*deltas) + b"0\r\n\r\n"
    reply = asked(streamed if is_streamed else whole({"choices": [{"message": {"content": "a star"}}]}))

    assert (reply.outcome, reply.text) == ("answered", "a star")
    assert is_streamed == (reply.first_token_s > 0)
    assert reply.first_token_s <= reply.total_s


def test_refusal_has_code_and_headers() -> None:
    reply = asked(whole({"error": {"code": "busy"}}, status="429 Too Many Requests", more="Retry-After: 3\r\n"))

    assert (reply.outcome, reply.status, reply.code) == ("refused", 429, "busy")
    assert reply.headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("page", "outcome"),
    [
        (b"", "not_accepted"),
        (STREAM_HEAD, "broken"),
        (STREAM_HEAD + chunked(delta("a ")), "broken"),
        (STREAM_HEAD + chunked(delta("a ")) + b"0\r\n\r\n", "broken"),
        (STREAM_HEAD + chunked({"error": {"code": "engine_failed"}}) + b"0\r\n\r\n", "refused"),
        (whole({"error": {"code": "busy"}}, status="429 Too Many Requests")[:-3], "broken"),
        (None, "hung"),
    ],
)
def test_outcomes_of_incomplete_answers(page: bytes | None, outcome: str) -> None:
    assert asked(page, timeout_s=0.05 if page is None else 20.0).outcome == outcome


@pytest.mark.parametrize("picture", [b"", b"a", b"ab", b"abc"])
@pytest.mark.parametrize("is_new", [False, True])
def test_bytes_are_appended_to_pictures_of_any_length(picture: bytes, is_new: bool) -> None:
    workload = Workload([Question(name="a", picture=picture, prompt=CAPTION)], is_new=is_new)
    bodies = [json.loads(next(workload)[1]) for _ in range(3)]
    urls = [body["messages"][0]["content"][0]["image_url"]["url"] for body in bodies]
    contents = [base64.b64decode(url.partition(",")[2], validate=True) for url in urls]

    assert all(content.startswith(picture) for content in contents)
    assert [int.from_bytes(content[-12:], "big") for content in contents] == ([1, 2, 3] if is_new else [0, 0, 0])


@pytest.mark.slow
def test_a_short_load_is_answered_as_the_captioner_answers(tmp_path: Path) -> None:
    bench_service.main(["--quick", "--out", str(tmp_path)])

    rows = read("service", tmp_path)["rows"]
    assert [(row["pictures"], row["clients"]) for row in rows] == [("new", 1), ("new", 4), ("known", 1), ("known", 4)]
    assert all(row["requests"] > 0 and not row["others"] and row["num_wrong"] == 0 for row in rows)
    assert "| known | 4 |" in (tmp_path / "service.md").read_text(encoding="utf-8")
