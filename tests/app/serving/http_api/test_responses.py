"""`/v1/responses`: its messages, its answer, and its events in OpenAI's order."""

from typing import Any

import pytest

from llama_adapter.app.captioning.tasks.answers import Answer, TextDelta, TokenLogprob
from llama_adapter.app.captioning.tasks.choose import OneOf
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.serving.http_api.conversation import ChatQuestion
from llama_adapter.app.serving.http_api.responses import ResponsesReply, parameters_of, understand
from llama_adapter.app.serving.http_api.schemas import (
    ResponsesRequest,
    with_task_fields,
)
from llama_adapter.llm.engine.sampling_params import SamplingParams
from tests.app.serving.http_api.live import answer, check_documented, frames_of

OLD, NEW = "data:image/png;base64,b2xk", "data:image/png;base64,bmV3"
BEGIN = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
END = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


def request_of(content: Any = "What?", **parameters: Any) -> ResponsesRequest:
    body = {"model": "default", "input": content, **parameters}
    return with_task_fields(ResponsesRequest).model_validate(body)


def question(content: Any = "What?", **parameters: Any) -> ChatQuestion:
    return understand(request_of(content, **parameters))


def item(role: str, *parts: str, **fields: Any) -> dict[str, Any]:
    kinds = {"assistant": "output_text"}
    content = [
        {"type": "input_image", "image_url": part, "detail": "auto"}
        if part.startswith("data:")
        else {"type": kinds.get(role, "input_text"), "text": part}
        for part in parts
    ]
    return {"role": role, "content": content, **fields}


@pytest.mark.parametrize(
    ("content", "parameters", "prompt"),
    [
        ("What?", {}, "What?"),
        ("What?", {"instructions": "Look."}, "What?"),
        ([item("user", NEW, "What?")], {}, "What?"),
        ([item("user", NEW)], {}, "default"),
        ([item("developer", "Look."), item("user", NEW, "One", "two", type="message")], {}, "One\ntwo"),
        ([{"role": "user", "content": "What?"}], {"instructions": "Look."}, "What?"),
    ],
)
def test_the_last_text_alone_is_the_question(content: Any, parameters: dict[str, Any], prompt: Any) -> None:
    assert question(content, **parameters).question.prompt("default") == prompt


def test_the_newest_picture_counts_and_earlier_turns_are_not_shown() -> None:
    earlier = item("assistant", "Red.", type="message", id="msg_1", status="completed", phase=None)

    asked = question([item("user", OLD, "What?"), earlier, item("user", "Why?", OLD, NEW)], instructions="Look.")

    assert (asked.picture_url, asked.picture_used) == (NEW, "input[2].content[2]")
    assert asked.num_ignored_turns == 3


def test_parameters_arrive_as_they_are_given() -> None:
    asked = question(
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        seed=7,
        max_output_tokens=9,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
    )

    assert asked.sampling == SamplingParams(max_new_tokens=9, temperature=0.5, top_p=0.25, top_k=3, seed=7)
    assert asked.with_logprobs
    assert question(answer_choices=["yes", "no"]).question.task == OneOf(("yes", "no"))


def test_a_schema_is_asked_property_by_property() -> None:
    schema = {"type": "object", "properties": {"star": {"type": "boolean"}}}

    asked = question(text={"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}})

    assert [one.task for one in asked.questions] == [OneOf(("yes", "no"))]


def reply(**options: Any) -> ResponsesReply:
    wanted = request_of(metadata={"a": "b"})
    head = {"id": "resp_1", "model": "m", "created_at": 1, **parameters_of(wanted, understand(wanted))}
    return ResponsesReply(head, **options)


def stream(*events: TextDelta | Answer, **options: Any) -> list[dict[str, Any]]:
    """The data of the events. Checks that each event is named by its type and that they are numbered in order."""
    frames = frames_of(reply(**options), *((0, event) for event in events))
    found = [data for _, data in frames]
    assert [name for name, _ in frames] == [event["type"] for event in found]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_an_answer_is_a_whole_response(snapshot: Any) -> None:
    body = reply().whole([answer("a star", unfamiliar=False)])
    body["completed_at"] = 2

    check_documented(body, "ResponseBody")
    assert body == snapshot


def test_a_stream_has_openai_s_events_in_order() -> None:
    events = stream(TextDelta(index=0, text="a "), TextDelta(index=0, text="star"), answer("a star"))

    delta = "response.output_text.delta"
    assert [event["type"] for event in events] == [*BEGIN, delta, delta, *END, "response.completed"]
    assert [event["delta"] for event in events if event["type"] == delta] == ["a ", "star"]
    created, last = events[0]["response"], events[-1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert (last["status"], last["output"]) == ("completed", [events[-2]["item"]])
    assert events[2]["item"]["id"] == events[4]["item_id"] == last["output"][0]["id"]
    assert last["usage"]["total_tokens"] == 7


def test_an_answer_that_was_cut_is_incomplete() -> None:
    last = stream(TextDelta(index=0, text="a"), answer("a", finish="length"))[-1]

    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_scored_answer_comes_in_one_piece_with_its_probabilities() -> None:
    events = stream(answer("yes", finish="choice", choice={"yes": 0.75, "no": 0.25}))

    assert [event["delta"] for event in events if "delta" in event] == ["yes"]
    assert events[-1]["response"]["answer_probabilities"] == {"yes": 0.75, "no": 0.25}


def test_an_error_ends_the_stream_with_a_failed_response() -> None:
    failed = answer("a", error=AnswerError(code="engine_failed", message="It failed."))

    *_, told, last = stream(TextDelta(index=0, text="a "), failed)

    assert (told["type"], told["code"], told["error"]["code"]) == ("error", "engine_failed", "engine_failed")
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "engine_failed", "message": "It failed."}


def test_log_probabilities_are_in_the_text_s_part() -> None:
    known = answer("a", logprobs=(TokenLogprob("a", -0.5),))

    events = stream(known, with_logprobs=True)

    expected = [{"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": []}]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == expected
    assert next(event for event in events if event["type"] == END[0])["logprobs"] == expected
    assert reply().whole([known])["output"][0]["content"][0]["logprobs"] == []
