"""The chunks of a stream, one by one."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message

from llama_adapter.app.captioning.tasks.answers import Answer, TextDelta, TokenLogprob
from llama_adapter.app.serving.http_api import replying
from llama_adapter.app.serving.http_api.access import VISIT, Visit
from llama_adapter.app.serving.http_api.asking import Pending
from llama_adapter.app.serving.http_api.chat import ChatReply
from llama_adapter.app.serving.http_api.replying import AnswerResponse
from llama_adapter.app.serving.online.request_handle import RequestHandle
from tests.app.serving.http_api.live import answer, frames_of

HEAD = {"id": "chatcmpl-1", "created": 1, "model": "m", "system_fingerprint": "fp"}


def stream(*events: TextDelta | Answer, **options: Any) -> list[Any]:
    """The data of the events. An event's index is that of its answer."""
    return [data for _, data in frames_of(ChatReply(HEAD, **options), *((event.index, event) for event in events))]


def deltas(chunks: list[Any]) -> list[Any]:
    return [chunk["choices"][0]["delta"] for chunk in chunks if chunk != "[DONE]" and chunk["choices"]]


def test_a_stream_is_the_role_the_text_the_reason_and_the_end() -> None:
    chunks = stream(TextDelta(index=0, text="a "), TextDelta(index=0, text="star\n\n"), answer("a star"))

    assert deltas(chunks) == [{"role": "assistant", "content": ""}, {"content": "a "}, {"content": "star\n\n"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, None, "stop"]
    assert chunks[-1] == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks[:-1])
    assert deltas(stream(answer(""))) == [{"role": "assistant", "content": ""}, {}]


def test_several_answers_are_told_apart_and_counted_together() -> None:
    second = answer("blue", index=1, finish="length")
    chunks = stream(
        TextDelta(index=1, text="blue"),
        TextDelta(index=0, text="a star"),
        second,
        answer("a star"),
        num_answers=2,
        with_usage=True,
    )

    assert [chunk["usage"] for chunk in chunks[:-2]] == [None] * 6
    choices = [chunk["choices"][0] for chunk in chunks[:-2]]
    assert [choice["index"] for choice in choices] == [0, 1, 1, 0, 1, 0]
    assert [choice["finish_reason"] for choice in choices][-2:] == ["length", "stop"]
    assert (chunks[-2]["choices"], chunks[-2]["usage"]) == (
        [],
        {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8},
    )


def test_log_probabilities_come_with_the_reason() -> None:
    known = answer("é", logprobs=(TokenLogprob("", -0.5), TokenLogprob("é", -0.25, (("e", -0.125),))))

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
    scored = answer("a star", finish="choice", choice={"a star": 1.0})
    assert ChatReply(HEAD, with_logprobs=True).whole([scored])["choices"][0]["logprobs"] is None


def test_a_scored_answer_comes_whole_with_its_probabilities() -> None:
    chunks = stream(answer("yes", finish="choice", choice={"yes": 0.75, "no": 0.25}))

    assert deltas(chunks) == [{"role": "assistant", "content": ""}, {"content": "yes"}, {}]
    assert chunks[-2]["choices"][0]["answer_probabilities"] == {"yes": 0.75, "no": 0.25}
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("said", [True, False, None])
def test_the_end_says_whether_the_picture_is_unfamiliar_where_the_model_can_tell(said: bool | None) -> None:
    chunks = stream(TextDelta(index=0, text="a star"), answer(unfamiliar=said))

    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert [choice.get("unfamiliar") for choice in choices] == [None, None, said]
    assert ["unfamiliar" in choice for choice in choices] == [False, False, said is not None]
    whole = ChatReply(HEAD).whole([answer(unfamiliar=said)])
    assert whole["choices"][0].get("unfamiliar") is said


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
