"""Answers in each of OpenAI's formats: whole, and as the events of a stream."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from llama_adapter.app.captioning.tasks.answers import Answer, TextDelta, TokenLogprob
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.serving.http_api import chat as chat_module
from llama_adapter.app.serving.http_api import replying, responses
from llama_adapter.app.serving.http_api.access import VISIT, Visit
from llama_adapter.app.serving.http_api.api import forms
from llama_adapter.app.serving.http_api.asking import NumberedEvent, Pending, Reply
from llama_adapter.app.serving.http_api.replying import AnswerResponse
from llama_adapter.app.serving.online.request_handle import RequestHandle
from tests.app.serving.http_api.asgi import Client
from tests.app.serving.http_api.live import INFO, answer, check_documented, failed
from tests.app.serving.http_api.requests import chat

REQUESTS = {
    "ChatCompletion": chat(),
    "ResponseBody": {"model": "default", "input": "What?", "metadata": {"a": "b"}},
    "Completion": {"model": "default", "prompt": "The star is"},
}
FORMS = dict(zip(REQUESTS, forms().values(), strict=True))


def reply_of(schema: str, *, with_usage: bool = False, **options: Any) -> Reply[Any]:
    form, usage = FORMS[schema], {"stream": True, "stream_options": {"include_usage": True}}
    request = form.request.model_validate(REQUESTS[schema] | (usage if with_usage else {}))
    asked = dataclasses.replace(form.reply.understand(request, INFO), **options)
    return form.reply(request, asked, {"id": f"{form.reply.id_prefix}1", "model": "m"}, INFO)


KNOWN = answer(
    "é star",
    logprobs=(
        TokenLogprob("", -0.5),
        TokenLogprob("é", -0.25, (("é", -0.25), ("e", -1.5))),
        TokenLogprob(" star", -0.125, ((" star", -0.125),)),
    ),
)
SCORED = answer("yes", finish="choice", choice={"yes": 0.75, "no": 0.25})
FAILED = answer("a", error=AnswerError(code="too_large", message="It failed."))  # a fault of the picture


def piece(text: str, index: int = 0, logprobs: tuple[TokenLogprob, ...] = ()) -> TextDelta:
    return TextDelta(index=index, text=text, logprobs=logprobs)


CASES: dict[str, tuple[list[TextDelta | Answer], dict[str, Any]]] = {
    "pieces": ([piece("a "), piece("star\n\n"), answer("a star", unfamiliar=False)], {}),
    "no text": ([answer("")], {}),
    "cut": ([piece("a"), answer("a", finish="length", unfamiliar=True)], {}),
    "scored": ([SCORED], {}),
    "failed": ([piece("a "), FAILED], {}),
    "log-probabilities": ([piece("é star"), KNOWN], {"num_logprobs": 0}),
    "log-probabilities in pieces": (
        [piece("é", logprobs=KNOWN.logprobs[:2]), piece(" star", logprobs=KNOWN.logprobs[2:]), KNOWN],
        {"num_logprobs": 0},
    ),
}
SEVERAL: list[TextDelta | Answer] = [
    *(piece("blue", 1), piece("a star"), answer("blue", index=1, finish="length"), answer("a star"))
]
CASES_OF_SEVERAL: dict[str, dict[str, tuple[list[TextDelta | Answer], dict[str, Any]]]] = {
    "ChatCompletion": {"answers": (SEVERAL, {"num_answers": 2, "with_usage": True})},
    "ResponseBody": {},
    "Completion": {"prompts": (SEVERAL, {"prompts": ((Question(),),) * 2, "with_usage": True})},
}


def streamed(reply: Reply[Any], events: list[TextDelta | Answer]) -> list[str]:
    """The events of a stream. An event's index is that of its answer."""

    async def given() -> AsyncIterator[NumberedEvent]:
        for event in events:
            yield event.index, event

    async def collect() -> bytes:
        return b"".join([frame async for frame in reply.frames(given())])

    *frames, end = asyncio.run(collect()).decode().split("\n\n")
    assert end == ""
    return frames


@pytest.mark.parametrize("schema", REQUESTS)
def test_answers_whole_and_streamed(schema: str, snapshot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chat_module, responses):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: 2.5))
    is_response = schema == "ResponseBody"
    found: dict[str, list[str]] = {}
    for name, (events, options) in (CASES | CASES_OF_SEVERAL[schema]).items():
        reply = reply_of(schema, **options)
        frames = streamed(reply, events)
        found[name] = data = [frame.removeprefix(kind_of(frame)) for frame in frames] if is_response else frames
        if FAILED in events:
            continue
        body = reply.whole(sorted((one for one in events if isinstance(one, Answer)), key=lambda one: one.index))
        check_documented(body, schema)
        if is_response:  # its last event has the whole answer
            assert json.dumps(body) in data[-1]
        else:
            found[name] = [*data, json.dumps(body)]
    assert found == snapshot
    # Without a wish nothing has log-probabilities, and scored answers never have any.
    plain, wish = reply_of(schema), reply_of(schema, num_logprobs=0)
    for reply, given, same in ((plain, KNOWN, dataclasses.replace(KNOWN, logprobs=())), (wish, SCORED, SCORED)):
        assert (streamed(reply, [given]), reply.whole([given])) == (streamed(plain, [same]), plain.whole([same]))


@pytest.mark.parametrize(("given", "repeated"), [(9, 9), (None, None), (-1, None)])
def test_responses_repeat_their_limit_of_tokens(given: int | None, repeated: int | None) -> None:
    form = FORMS["ResponseBody"]
    request = form.request.model_validate(REQUESTS["ResponseBody"] | {"max_output_tokens": given})
    body = form.reply(request, form.reply.understand(request, INFO), {"id": "resp_1"}, INFO).whole([SCORED])
    assert body["max_output_tokens"] == repeated


def kind_of(frame: str) -> str:
    """The line of an event that repeats the kind in its data."""
    return f"event: {json.loads(frame.partition('data: ')[2])['type']}\n"


def sent_to(client: Client, handle: RequestHandle, *, is_stream: bool) -> Visit:
    """Send a request's answer to a client; returns what the log has about it."""
    visit = client.scope[VISIT] = Visit()
    client.ask(AnswerResponse(Pending(answering=[handle], reply=reply_of("ChatCompletion")), is_stream=is_stream))
    return visit


def test_reader_stalled_at_the_end_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replying, "STALLED_READER_S", 0.05)
    client, handle = Client(), RequestHandle(0, cancel=lambda handle: None)
    handle.deliver(answer())

    async def send(message: Message) -> None:
        if message.get("more_body") is False:
            await asyncio.Event().wait()

    client.send = send  # type: ignore[method-assign]
    with pytest.raises(TimeoutError):
        sent_to(client, handle, is_stream=True)
    assert handle.is_cancelled


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_has_hung_up_is_sent_nothing_and_the_log_has_its_answer_s_error(is_stream: bool) -> None:
    client, handle = Client(hangs_up=True), RequestHandle(0, cancel=lambda handle: handle.deliver(failed("cancelled")))
    visit = sent_to(client, handle, is_stream=is_stream)

    assert (client.sent, visit.is_left, visit.error) == ([], True, "cancelled")
