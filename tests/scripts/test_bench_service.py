"""The load on a service: what the benchmark counts. Speed is not tested."""

import asyncio
import base64
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from scripts import bench_service
from scripts.pages.render import read
from scripts.service_bench.client import Reply, ask_once
from scripts.service_bench.process import ServerProcess
from scripts.service_bench.promises import at_the_end
from scripts.service_bench.questions import CAPTION, Question, Workload

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*events: object) -> bytes:
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    pieces = [f"data: {text}\n\n".encode() for text in texts]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


def delta(text: str, *, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


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
    usage = {"usage": {"completion_tokens": 2}}
    deltas = (delta(""), delta("a "), delta("star"), delta("", finish="stop"), {"choices": [], **usage}, "[DONE]")
    choice = {"message": {"content": "a star"}, "finish_reason": "stop"}
    streamed = STREAM_HEAD + chunked(*deltas) + b"0\r\n\r\n"
    reply = asked(streamed if is_streamed else whole({"choices": [choice], **usage}))

    assert (reply.outcome, reply.text, reply.finish, reply.num_tokens) == ("answered", "a star", "stop", 2)
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


@pytest.mark.parametrize(
    ("started", "outcome", "num_lost"),
    [
        (0.0, "answered", 0),
        (0.0, "refused", 0),
        (0.0, "broken", 1),
        (0.0, "hung", 1),
        (0.0, "not_accepted", 1),
        (2.0, "broken", 1),
        (2.0, "not_accepted", 0),
        (2.0, "refused", 0),
    ],
)
def test_lost_requests_at_the_end(started: float, outcome: Any, num_lost: int) -> None:
    reply = Reply(outcome=outcome, started=started, total_s=5.0, text="a star")

    assert at_the_end([(0, reply)], ended_at=1.0, expected=["a star"])["num_lost"] == num_lost


@pytest.mark.slow
def test_service_keeps_its_promises_under_a_short_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ServerProcess() as server:  # one server for all measurements of the part; the last one ends it
        monkeypatch.setattr(bench_service, "ServerProcess", lambda: nullcontext(server))
        assert bench_service.main(["--quick", "--part", "load", "--out", str(tmp_path)]) == 0

    load = read("service", tmp_path)["load"]
    assert all(row["requests"] > 0 and not row["others"] and row["num_wrong"] == 0 for row in load["rows"])
    assert [row["different"] for row in load["equality"]] == [0, 0]
    overload, end = load["overload"], load["end"]
    assert set(overload["outcomes"]) <= {"answered", "refused 429 busy", "refused 503 unavailable"}
    assert sum(overload["outcomes"].values()) == overload["requests"]
    assert overload["num_wrong"] == overload["num_without_retry_after"] == 0
    assert (end["num_lost"], end["num_wrong"], end["exit_code"]) == (0, 0, 0)


@pytest.mark.slow
def test_attack_with_a_slow_picture(tmp_path: Path) -> None:
    assert bench_service.main(["--quick", "--part", "attack", "--out", str(tmp_path)]) == 0

    (row,) = read("service", tmp_path)["attack"]["rows"]
    assert row["exit_code"] == 0
    assert sum(row["slow"].values()) == 8
    assert row["slow"].keys() <= {"answered", "under way"}  # the outcomes when the attack ends
    assert row["most_memory_mb"] > 50
    assert "| small |" in (tmp_path / "service.md").read_text()
