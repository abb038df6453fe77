"""How messages become one question about one picture or none."""

from typing import Any

import pytest

from llama_adapter.app.captioning.tasks.choose import OneOf
from llama_adapter.app.captioning.tasks.task import FREE_TEXT
from llama_adapter.app.serving.http_api.api import forms
from llama_adapter.app.serving.http_api.conversation import ChatQuestion
from llama_adapter.app.serving.http_api.errors import ApiError
from llama_adapter.app.serving.http_api.responses import parameters_of
from llama_adapter.llm.engine.sampling_params import SamplingParams
from tests.app.serving.http_api.requests import chat, image, user

CHAT, RESPONSES, _ = forms().values()


def question(*messages: dict[str, Any], **parameters: Any) -> ChatQuestion:
    return CHAT.understand(CHAT.request.model_validate(chat(*messages, **parameters)))


def question_of_responses(content: Any, **parameters: Any) -> ChatQuestion:
    body = {"model": "default", "input": content, **parameters}
    return RESPONSES.understand(RESPONSES.request.model_validate(body))


def system(text: str, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": text}


def assistant(text: str | None) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calling(**fields: Any) -> dict[str, Any]:
    """An earlier turn that calls a tool."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **fields}


def result(role: str = "tool", content: Any = "sunny") -> dict[str, Any]:
    return {"role": role, "tool_call_id": "c1", "name": "f", "content": content}


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([user(image(), "What?")], "What?"),
        ([user("What?", image())], "What?"),
        ([user("One", image(), "two")], "One\ntwo"),
        ([user(image())], "default"),
        ([user(image(), " \n")], "default"),
        ([system("Look."), user(image(), "What?")], "What?"),
        ([system("Look.", "developer"), user(image(), "What?")], "What?"),
        ([user(image()), system("Look."), user("What?")], "What?"),
        ([system("Look."), user(image())], "default"),
        ([user(image()), {"role": "user", "content": "What?"}], "What?"),
    ],
)
def test_the_last_text_alone_is_the_instruction(messages: list[Any], prompt: Any) -> None:
    assert question(*messages).question.prompt("default") == prompt


@pytest.mark.parametrize(
    ("messages", "num_ignored"),
    [
        ([user(image(), "What?")], 0),
        ([system("Look."), user(image(), "What?")], 1),
        ([system(" "), user(image(), "What?")], 0),
        ([system("Look."), system("Think.", "developer"), user(image(), "What?")], 2),
        ([{"role": "system", "content": [image()]}, user("What?")], 0),
        ([user(image(), "What?"), calling(), result(), user("And?")], 3),
        ([user(image()), {**assistant("Red."), "reasoning_content": "Hm."}, user("And?")], 1),
        ([user(image()), {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, user("And?")], 1),
        ([user(image()), user("What?")], 0),  # the first message has only a picture, and the picture is used
        ([user(image(), "What?"), assistant("Red."), user("And?")], 2),
        ([user(image(), "What?"), assistant(None), user("And?")], 1),
        ([user(image()), assistant("Red."), user(image(), "And?")], 2),
        ([user(image(), "What?"), system("Look.")], 1),
        ([user(image(), "What?"), calling(), result(), result("function")], 3),
    ],
)
def test_earlier_messages_are_counted_when_something_of_them_is_not_shown(
    messages: list[Any], num_ignored: int
) -> None:
    assert question(*messages).num_ignored_turns == num_ignored


@pytest.mark.parametrize(
    ("messages", "parameters", "code", "param"),
    [
        ([user(" ")], {}, "missing_image", "messages"),
        ([user(image(), "What?"), assistant("Red.")], {}, "invalid_value", "messages"),
        ([user(image(), "What?"), calling(content="Wait."), result()], {}, "invalid_value", "messages"),
        ([user(image(), "What?"), calling()], {}, "invalid_value", "messages"),
        ([user(image())], {"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ([user(image())], {"max_tokens": 3, "max_completion_tokens": 4}, "invalid_value", "max_tokens"),
    ],
)
def test_what_is_no_question_is_refused(messages: list[Any], parameters: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        question(*messages, **parameters)

    assert (caught.value.http_status, caught.value.code, caught.value.param) == (400, code, param)


OLD, NEW = "data:image/png;base64,b2xk", "data:image/png;base64,bmV3"


@pytest.mark.parametrize(
    ("messages", "url", "used"),
    [
        ([user("What?")], None, None),
        ([{"role": "system", "content": [image(NEW)]}, user("What?")], NEW, None),
        ([{"role": "developer", "content": [image(OLD)]}, user(image(NEW), "What?")], NEW, "messages[1].content[0]"),
        ([user("Look."), calling(), result(content=[image(NEW)]), user("What?")], NEW, None),
        ([user(image(NEW), "What?")], NEW, None),
        ([user({"type": "image_url", "image_url": NEW}, "What?")], NEW, None),
        ([user(image(OLD), "What?", image(NEW))], NEW, "messages[0].content[2]"),
        ([user(image(NEW), image(OLD)), user(image(OLD), image(NEW)), user("What?")], NEW, "messages[1].content[1]"),
    ],
)
def test_the_last_picture_of_the_newest_message_with_one_counts(
    messages: list[Any], url: str | None, used: str | None
) -> None:
    asked = question(*messages)

    assert (asked.picture_url, asked.picture_used) == (url, used)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": NEW, "detail": None}},
        {"type": "image_url", "image_url": {"url": NEW, "detail": "high", "format": "png"}},
        {"type": "image_url", "image_url": {"url": NEW}, "text": None, "cache_control": {"type": "ephemeral"}},
        {"type": "image_url", "image_url": NEW, "id": 1},
        {"type": "input_image", "image_url": NEW, "detail": None, "file_id": None},
        {"type": "input_image", "image_url": {"url": NEW}},
        {"type": None, "image_url": {"url": NEW}},
        {"image_url": {"url": NEW}},
        {"image_url": NEW, "text": None},
    ],
)
@pytest.mark.parametrize(
    "text",
    [
        {"type": "text", "text": "What?", "image_url": None, "cache_control": None},
        {"type": "text", "text": "What?", "cache_control": {"type": "ephemeral"}, "annotations": [1]},
        {"type": "input_text", "text": "What?"},
        {"type": "output_text", "text": "What?"},
        {"type": None, "text": "What?"},
        {"text": "What?"},
    ],
)
def test_parts_are_understood_as_clients_write_them(part: dict[str, Any], text: dict[str, Any]) -> None:
    message = {"role": "user", "content": [text, part], "name": None, "id": "m1", "cache_control": {}}

    for asked in (question(message), question_of_responses([message])):
        assert (asked.picture_url, asked.question.instruction) == (NEW, "What?")


@pytest.mark.parametrize(
    "earlier",
    [
        [calling(), result()],
        [calling(content=""), result("function")],
        [calling(tool_calls=None, function_call={"name": "f", "arguments": "{}"}), result("function", content=None)],
        [calling(content=[]), result(content=[{"type": "text", "text": "sunny"}])],
        [calling(content=[{"type": "tool_use", "id": "c1"}]), result(content=[{"type": "tool_result"}])],
        [{**assistant("Red."), "reasoning_content": "Hm.", "audio": {"id": "a"}, "annotations": [{}], "refusal": None}],
        [{"role": "assistant"}],
    ],
)
def test_earlier_turns_are_no_reason_to_refuse(earlier: list[Any]) -> None:
    asked = question(user(image(NEW), "Hello"), *earlier, user("What?"))

    assert (asked.picture_url, asked.question.instruction) == (NEW, "What?")


def test_nothing_given_and_null_mean_the_defaults_of_the_product() -> None:
    given = question()
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty")
    null = question(**dict.fromkeys((*names, "frequency_penalty", "stop", "max_tokens", "answer_choices")))

    assert given.sampling == null.sampling == SamplingParams()
    assert (given.stop, given.question) == (null.stop, null.question)
    assert (given.stop, given.question.task) == ((), FREE_TEXT)


def test_parameters_arrive_as_they_are_given() -> None:
    given = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.1, "seed": -7}
    given |= {"repetition_penalty": 1.2, "presence_penalty": -2, "frequency_penalty": 0.5}
    asked = question(**given, max_completion_tokens=9, stop=["a", "b"], n=3, logprobs=True)

    assert asked.sampling == SamplingParams(max_new_tokens=9, **given)
    assert (asked.stop, asked.num_answers, asked.with_logprobs) == (("a", "b"), 3, True)
    assert question(top_k=-1).sampling.top_k == 0
    assert question(max_tokens=5, stop="a").stop == ("a",)


def test_choices_need_no_stop() -> None:
    for name in ("answer_choices", "guided_choice"):
        asked = question(**{name: ["yes", "no"]}, stop="y")

        assert (asked.question.task, asked.stop) == (OneOf(("yes", "no")), ())


def test_the_turns_of_a_text_chat_are_kept_for_templates_with_turns() -> None:
    messages = [system("Be brief."), user("Hello"), assistant("Hi."), user("Why?")]

    assert question(*messages).turns == (("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi."))
    assert question(user("Hello", image()), assistant("Hi."), user("Why?")).turns == ()
    assert question(user("Hello"), calling(), result(), user("Why?")).turns == (("user", "Hello"),)


# Responses


def item(role: str, *parts: str, **fields: Any) -> dict[str, Any]:
    """A message as `/v1/responses` writes it."""
    kind = "output_text" if role == "assistant" else "input_text"
    content = [
        {"type": "input_image", "image_url": part, "detail": "auto"}
        if part.startswith("data:")
        else {"type": kind, "text": part}
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
def test_the_last_text_alone_is_the_question_of_responses(
    content: Any, parameters: dict[str, Any], prompt: Any
) -> None:
    assert question_of_responses(content, **parameters).question.prompt("default") == prompt


def test_responses_have_the_newest_picture_and_the_parameters_of_the_request() -> None:
    earlier = item("assistant", "Red.", type="message", id="msg_1", status="completed", phase=None)
    asked = question_of_responses(
        [item("user", OLD, "What?"), earlier, item("user", "Why?", OLD, NEW)],
        instructions="Look.",
        **{"temperature": 0.5, "top_p": 0.25, "top_k": 3, "seed": 7, "max_output_tokens": 9},
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
    )

    assert (asked.picture_url, asked.picture_used) == (NEW, "input[2].content[2]")
    assert asked.num_ignored_turns == 3
    assert asked.sampling == SamplingParams(max_new_tokens=9, temperature=0.5, top_p=0.25, top_k=3, seed=7)
    assert asked.with_logprobs


@pytest.mark.parametrize(("given", "repeated"), [(9, 9), (None, None), (-1, None)])
def test_responses_repeat_their_limit_of_tokens(given: int | None, repeated: int | None) -> None:
    request = RESPONSES.request.model_validate({"model": "default", "input": "What?", "max_output_tokens": given})
    assert parameters_of(request, RESPONSES.understand(request))["max_output_tokens"] == repeated


def test_responses_have_choices_and_schemas() -> None:
    schema = {"type": "object", "properties": {"star": {"type": "boolean"}}}
    asked = question_of_responses("What?", text={"format": {"type": "json_schema", "name": "a", "schema": schema}})

    assert [one.task for one in asked.questions] == [OneOf(("yes", "no"))]
    assert question_of_responses("What?", answer_choices=["yes", "no"]).question.task == OneOf(("yes", "no"))
