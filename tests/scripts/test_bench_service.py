"""The load on a service: it counts what it says it counts; how fast a server is, is nobody's promise."""

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from scripts import attack_service
from scripts.bench_service import QUICK, measure
from scripts.pages.render import render
from scripts.service_bench import slow_files
from scripts.service_bench.client import Reply, ask_once
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
    """What the client makes of a server that says this and hangs up; None says nothing and waits."""

    async def run() -> Reply:
        done: list[asyncio.Task[Any]] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            done.append(task)
            await reader.readuntil(b"the body")
            if page is None:
                await reader.read()
            else:
                writer.write(page)
            writer.close()
            await writer.wait_closed()

        return await _with_server(serve, done, timeout_s=timeout_s)

    return asyncio.run(run())


async def _with_server(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    done: list[asyncio.Task[Any]],
    *,
    timeout_s: float,
) -> Reply:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        return await ask_once("127.0.0.1", port, b"the body", timeout_s=timeout_s)
    finally:
        server.close()
        await server.wait_closed()
        await asyncio.gather(*done, return_exceptions=True)


def test_a_whole_answer_is_read() -> None:
    reply = asked(
        whole(
            {
                "choices": [{"message": {"content": "a star"}, "finish_reason": "stop"}],
                "usage": {"completion_tokens": 2},
            }
        )
    )

    assert (reply.outcome, reply.text, reply.finish, reply.num_tokens) == ("answered", "a star", "stop", 2)


def test_a_stream_is_put_together() -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 2}}
    page = STREAM_HEAD + chunked(delta(""), delta("a "), delta("star"), delta("", finish="stop"), usage, "[DONE]")
    reply = asked(page + b"0\r\n\r\n")

    assert (reply.outcome, reply.text, reply.finish, reply.num_tokens) == ("answered", "a star", "stop", 2)
    assert 0 < reply.first_token_s <= reply.total_s


def test_a_refusal_keeps_its_code_and_headers() -> None:
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
    ],
)
def test_an_answer_that_is_not_whole_is_told_from_none_at_all(page: bytes, outcome: str) -> None:
    assert asked(page).outcome == outcome


def test_a_server_that_says_nothing_is_hung() -> None:
    assert asked(None, timeout_s=0.05).outcome == "hung"


def test_new_pictures_differ_in_their_bytes_and_known_ones_do_not() -> None:
    question = Question(name="a", picture=b"\x89PNG", prompt=CAPTION)
    for is_new in (True, False):
        workload = Workload([question], is_new=is_new)
        bodies = [json.loads(next(workload)[1]) for _ in range(3)]
        urls = {body["messages"][0]["content"][0]["image_url"]["url"] for body in bodies}
        assert len(urls) == (3 if is_new else 1)


@pytest.mark.parametrize("picture", [b"", b"a", b"ab", b"abc"])
def test_bytes_are_put_behind_a_picture_of_any_length(picture: bytes) -> None:
    body = Question(name="a", picture=picture, prompt=CAPTION).template(stream=True).body(7)
    url = json.loads(body)["messages"][0]["content"][0]["image_url"]["url"]

    content = base64.b64decode(url.partition(",")[2], validate=True)
    assert content.startswith(picture)
    assert content.endswith((7).to_bytes(12, "big"))


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
def test_what_counts_as_lost_at_the_end(started: float, outcome: Any, num_lost: int) -> None:
    reply = Reply(outcome=outcome, started=started, total_s=5.0, text="a star")

    assert at_the_end([(0, reply)], ended_at=1.0, expected=["a star"])["num_lost"] == num_lost


@pytest.mark.slow
def test_a_service_keeps_its_promises_under_a_short_load() -> None:
    figures = measure(QUICK)

    assert all(row["requests"] > 0 and not row["others"] and row["num_wrong"] == 0 for row in figures["rows"])
    assert [row["different"] for row in figures["equality"]] == [0, 0]
    overload = figures["overload"]
    assert set(overload["outcomes"]) <= {"answered", "refused 429 busy", "refused 503 unavailable"}
    assert sum(overload["outcomes"].values()) == overload["requests"]
    assert overload["num_wrong"] == overload["num_without_retry_after"] == 0
    assert (figures["end"]["num_lost"], figures["end"]["num_wrong"], figures["end"]["exit_code"]) == (0, 0, 0)
    assert render("service", {"load": figures})


@pytest.mark.slow
def test_a_slow_picture_among_good_ones_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"small": lambda: slow_files.progressive_jpeg(side=256, num_scans=50)}
    monkeypatch.setattr(attack_service, "KINDS", kinds)
    monkeypatch.setattr(attack_service, "CALM_S", 0.5)

    assert attack_service.main(["--seconds", "1", "--out", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "service.json").read_text())["attack"]["rows"]
    assert row["exit_code"] == 0
    assert row["slow"] == {"answered": 8}
    assert row["most_memory_mb"] > 50
    assert "| small |" in (tmp_path / "service.md").read_text()
