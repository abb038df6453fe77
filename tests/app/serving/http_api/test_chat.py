"""The chunks of a stream, one by one."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message

from llama_adapter.app.captioning.tasks.answers import Answer, TextDelta, TokenLogprob
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.serving.http_api import replying
from llama_adapter.app.serving.http_api.access import VISIT, Visit
from llama_adapter.app.serving.http_api.asking import NumberedEvent, Pending
from llama_adapter.app.serving.http_api.chat import ChatReply
from llama_adapter.app.serving.http_api.replying import AnswerResponse
from llama_adapter.app.serving.online.request_handle import RequestHandle

HEAD = {"id": "chatcmpl-1", "created": 1, "model": "m", "system_fingerprint": "fp"}


def answer(**fields: Any) -> Answer:
    values = {"picture": "", "digest": "", "prompt": "", "text": "a star", "token_ids": (1, 2), "finish": "stop"}
    return Answer(prompt_tokens=5, **{"index": 0, **values, **fields})


def stream(*events: TextDelta | Answer, **options: Any) -> list[Any]:
    """The parsed data of the events; the end mark stays text. An event's index is that of its answer."""

    async def given() -> AsyncIterator[NumberedEvent]:
        for event in events:
            yield event.index, event

    async def collect() -> bytes:
        return b"".join([frame async for frame in ChatReply(HEAD, **options).frames(given())])

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


def test_several_answers_are_told_apart_and_counted_together() -> None:
    second = answer(index=1, text="blue", token_ids=(1,), finish="length")
    chunks = stream(
        TextDelta(index=1, text="blue"),
        TextDelta(index=0, text="a star"),
        second,
        answer(),
        num_answers=2,
        with_usage=True,
    )

    choices = [chunk["choices"][0] for chunk in chunks[:-2]]
    assert [choice["index"] for choice in choices] == [0, 1, 1, 0, 1, 0]
    assert [choice["finish_reason"] for choice in choices][-2:] == ["length", "stop"]
    assert chunks[-2]["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def test_log_probabilities_come_with_the_reason() -> None:
    known = answer(text="é", logprobs=(TokenLogprob("", -0.5), TokenLogprob("é", -0.25, (("e", -0.125),))))

    whole = ChatReply(HEAD, with_logprobs=True).whole([known])["choices"][0]["logprobs"]
    assert stream(known, with_logprobs=True)[-2]["choices"][0]["logprobs"] == whole
    assert whole["content"] == [
        {"token": "", "bytes": [], "logprob": -0.5, "top_logprobs": []},
        {
            "token": "é",
            "bytes": [0xC3, 0xA9],
            "logprob": -0.25,
            "top_logprobs": [{"token": "e", "bytes": [101], "logprob": -0.125}],
        },
    ]
    assert ChatReply(HEAD).whole([known])["choices"][0]["logprobs"] is None
    scored = answer(finish="choice", choice={"a star": 1.0})
    assert ChatReply(HEAD, with_logprobs=True).whole([scored])["choices"][0]["logprobs"] is None


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
    monkeypatch.setattr(replying, "STALLED_READER_S", 0.05)
    handle = RequestHandle(0, cancel=lambda handle: None)
    handle.deliver(answer())

    async def send(message: Message) -> None:
        if message.get("more_body") is False:
            await asyncio.Event().wait()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def stream_it() -> None:
        reply = AnswerResponse(Pending(answering=[handle], reply=ChatReply(HEAD)), is_stream=True)
        scope = {"type": "http", VISIT: Visit()}
        streaming_it = asyncio.create_task(reply(scope, receive, send))
        assert (await asyncio.wait({streaming_it}, timeout=20))[0]
        with pytest.raises(TimeoutError):
            await streaming_it

    asyncio.run(stream_it())
    assert handle.is_cancelled
