"""What a stream consists of, piece by piece."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message

from llama_adapter.app.http_api import chat
from llama_adapter.app.http_api.access import VISIT, Visit
from llama_adapter.app.http_api.chat import ChatResponse, stream_frames
from llama_adapter.app.online.request_handle import RequestHandle
from llama_adapter.app.tasks.answers import Answer, AnswerError, TextDelta

HEAD = {"id": "chatcmpl-1", "created": 1, "model": "m", "system_fingerprint": "fp"}


def answer(**fields: Any) -> Answer:
    values = {"picture": "", "digest": "", "prompt": "", "text": "a star", "token_ids": (1, 2), "finish": "stop"}
    return Answer(index=0, prompt_tokens=5, **{**values, **fields})


def stream(*events: TextDelta | Answer, with_usage: bool = False) -> list[Any]:
    """The events' data, parsed; the end mark stays text."""

    async def given() -> AsyncIterator[TextDelta | Answer]:
        for event in events:
            yield event

    async def collect() -> bytes:
        return b"".join([frame async for frame in stream_frames(given(), head=HEAD, with_usage=with_usage)])

    pieces = asyncio.run(collect()).decode().split("\n\n")
    assert pieces.pop() == ""
    assert all(piece.startswith("data: ") and "\n" not in piece for piece in pieces)
    data = [piece.removeprefix("data: ") for piece in pieces]
    return [piece if piece == "[DONE]" else json.loads(piece) for piece in data]


def deltas(chunks: list[Any]) -> list[Any]:
    return [chunk["choices"][0]["delta"] for chunk in chunks if chunk != "[DONE]" and chunk["choices"]]


def test_a_stream_is_the_role_the_text_the_reason_and_the_end() -> None:
    chunks = stream(TextDelta(index=0, text="a "), TextDelta(index=0, text="star\n\n"), answer())

    assert deltas(chunks) == [{"role": "assistant", "content": ""}, {"content": "a "}, {"content": "star\n\n"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, None, "stop"]
    assert chunks[-1] == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_counts_come_last_and_only_when_they_are_asked_for() -> None:
    chunks = stream(TextDelta(index=0, text="a star"), answer(), with_usage=True)

    assert [chunk["usage"] for chunk in chunks[:-2]] == [None, None, None]
    assert chunks[-2]["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    assert chunks[-2]["choices"] == []


def test_an_answer_that_was_cut_says_so() -> None:
    assert stream(answer(finish="length"))[-2]["choices"][0]["finish_reason"] == "length"


def test_a_scored_answer_comes_whole_with_its_probabilities() -> None:
    chunks = stream(answer(text="yes", finish="choice", choice={"yes": 0.75, "no": 0.25}))

    assert deltas(chunks) == [{"role": "assistant", "content": ""}, {"content": "yes"}, {}]
    assert chunks[-2]["choices"][0]["answer_probabilities"] == {"yes": 0.75, "no": 0.25}
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("said", [True, False, None])
def test_the_end_says_whether_the_picture_is_unfamiliar_where_the_model_can_tell(said: bool | None) -> None:
    chunks = stream(TextDelta(index=0, text="a star"), answer(unfamiliar=said))

    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert [choice.get("unfamiliar") for choice in choices] == [None, None, said]
    assert ["unfamiliar" in choice for choice in choices] == [False, False, said is not None]


def test_an_answer_without_text_has_no_piece_of_text() -> None:
    assert deltas(stream(answer(text="", token_ids=()))) == [{"role": "assistant", "content": ""}, {}]


def test_an_error_ends_the_stream_in_the_place_of_a_reason() -> None:
    failed = answer(finish="error", error=AnswerError(code="deadline", message="Too late."))

    chunks = stream(TextDelta(index=0, text="a "), failed)

    assert chunks[-2]["error"]["code"] == "deadline"
    assert chunks[-1] == "[DONE]"


def test_reader_stalled_at_the_end_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "STALLED_READER_S", 0.05)
    handle = RequestHandle(0, cancel=lambda handle: None)
    handle.deliver(answer())

    async def send(message: Message) -> None:
        if message.get("more_body") is False:
            await asyncio.Event().wait()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def stream_it() -> None:
        reply = ChatResponse(handle, head=HEAD, headers={}, is_stream=True, with_usage=False)
        scope = {"type": "http", VISIT: Visit()}
        streaming_it = asyncio.create_task(reply(scope, receive, send))
        assert (await asyncio.wait({streaming_it}, timeout=20))[0]
        with pytest.raises(TimeoutError):
            await streaming_it

    asyncio.run(stream_it())
    assert handle.is_cancelled
