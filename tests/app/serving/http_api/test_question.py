"""How messages become one question about one picture or none."""

import dataclasses
from typing import Any

import pytest

from llama_adapter.app.captioning.tasks.choose import OneOf
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.captioning.tasks.task import FREE_TEXT
from llama_adapter.app.models.spec import ModelInfo
from llama_adapter.app.serving.http_api.api import forms
from llama_adapter.app.serving.http_api.conversation import ChatQuestion
from llama_adapter.app.serving.http_api.errors import ApiError
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.picture_format import PictureFormat
from tests.app.serving.http_api.live import INFO
from tests.app.serving.http_api.requests import chat, image, json_schema, user

CHAT, RESPONSES, _ = forms().values()
OLD, NEW = "data:image/png;base64,b2xk", "data:image/png;base64,bmV3"


def question(*messages: dict[str, Any], info: ModelInfo = INFO, **parameters: Any) -> ChatQuestion:
    return CHAT.reply.understand(CHAT.request.model_validate(chat(*messages, **parameters)), info)


def question_of_responses(content: Any, **parameters: Any) -> ChatQuestion:
    body = {"model": "default", "input": content, **parameters}
    return RESPONSES.reply.understand(RESPONSES.request.model_validate(body), INFO)


def only(asked: ChatQuestion) -> Question:
    ((question,),) = asked.prompts
    return question


def said(role: str, text: Any) -> dict[str, Any]:
    return {"role": role, "content": text}


def calling(**fields: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **fields}


def result(role: str = "tool", content: Any = "sunny") -> dict[str, Any]:
    return {"role": role, "tool_call_id": "c1", "name": "f", "content": content}


ASKED, LOOK, RED = user(image(NEW), "What?"), said("system", "Look."), said("assistant", "Red.")
CALLS = [  # of tools, with their results, and how many of the two turns have something that is not shown
    ([calling(), result()], 2),
    ([calling(content=""), result("function")], 2),
    ([calling(tool_calls=None, function_call={"name": "f"}), result("function", content=None)], 0),
    ([calling(content=[]), result(content=[{"type": "text", "text": "sunny"}])], 2),
    ([calling(content=[{"type": "tool_use", "id": "c1"}]), result(content=[{"type": "tool_result"}])], 2),
    ([{**RED, "reasoning_content": "Hm.", "audio": {"id": "a"}, "annotations": [{}], "refusal": None}], 1),
    ([said("assistant", [{"type": "refusal", "refusal": "No."}])], 1),
    ([{"role": "assistant"}], 0),
]


@pytest.mark.parametrize(
    ("messages", "prompt", "num_ignored"),
    [
        ([ASKED], "What?", 0),
        ([user("One", image(NEW), "two")], "One\ntwo", 0),
        ([user(image(NEW), " \n")], "default", 0),
        ([user(image(NEW)), said("user", "What?")], "What?", 0),  # the picture of the first message is used
        ([user(image(NEW)), LOOK, user("What?")], "What?", 1),
        ([said("system", " "), ASKED], "What?", 0),
        ([said("system", [image(NEW)]), user("What?")], "What?", 0),
        ([LOOK, said("developer", "Think."), ASKED], "What?", 2),
        ([ASKED, LOOK], "What?", 1),
        ([user(image(OLD)), RED, user(image(NEW), "And?")], "And?", 2),
        *(([ASKED, *calls, user("And?")], "And?", 1 + number) for calls, number in CALLS),
    ],
)
def test_the_last_text_alone_is_the_question_and_turns_that_are_not_shown_in_full_are_counted(
    messages: list[Any], prompt: Any, num_ignored: int
) -> None:
    asked = question(*messages)
    assert (only(asked).prompt("default"), asked.urls, asked.num_ignored_turns) == (prompt, (NEW,), num_ignored)


@pytest.mark.parametrize(
    ("messages", "parameters", "code", "param"),
    [
        ([user(" ")], {}, "missing_image", "messages"),
        ([ASKED, RED], {}, "invalid_value", "messages"),
        ([ASKED, calling(content="Wait."), result()], {}, "invalid_value", "messages"),
        ([ASKED, calling()], {}, "invalid_value", "messages"),
        ([ASKED], {"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ([ASKED], {"max_tokens": 3, "max_completion_tokens": 4}, "invalid_value", "max_tokens"),
    ],
)
def test_what_is_no_question_is_refused(messages: list[Any], parameters: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        question(*messages, **parameters)

    assert (caught.value.http_status, caught.value.code, caught.value.param) == (400, code, param)


@pytest.mark.parametrize(
    ("messages", "urls", "used"),
    [
        ([user("What?")], (), None),
        ([said("developer", [image(OLD)]), ASKED], (NEW,), "messages[1].content[0]"),
        ([user("Look."), calling(), result(content=[image(NEW)]), user("What?")], (NEW,), None),
        ([user(image(OLD), "What?", image(NEW))], (NEW,), "messages[0].content[2]"),
        ([user(image(NEW), image(OLD)), user(image(OLD), image(NEW)), user("What?")], (NEW,), "messages[1].content[1]"),
    ],
)
def test_the_last_picture_of_the_newest_message_with_one_counts(
    messages: list[Any], urls: tuple[str, ...], used: str | None
) -> None:
    asked = question(*messages)

    assert (asked.urls, asked.picture_used) == (urls, used)


@pytest.mark.parametrize(
    "part",
    [
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
    ],
)
def test_parts_are_understood_as_clients_write_them(part: dict[str, Any], text: dict[str, Any]) -> None:
    message = {"role": "user", "content": [text, part], "name": None, "id": "m1", "cache_control": {}}

    for asked in (question(message), question_of_responses([message])):
        assert (asked.urls, only(asked).instruction) == ((NEW,), "What?")


def test_nothing_given_and_null_mean_the_defaults_of_the_product() -> None:
    given = question()
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty")
    null = question(**dict.fromkeys((*names, "frequency_penalty", "stop", "max_tokens", "answer_choices")))

    assert given.sampling == null.sampling == SamplingParams()
    assert (given.stop, given.prompts) == (null.stop, null.prompts)
    assert (given.stop, only(given).task) == ((), FREE_TEXT)


def test_parameters_arrive_as_they_are_given() -> None:
    given = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.1, "seed": -7}
    given |= {"repetition_penalty": 1.2, "presence_penalty": -2, "frequency_penalty": 0.5}
    asked = question(**given, max_completion_tokens=9, stop=["a", "b"], n=3, logprobs=True)

    assert asked.sampling == SamplingParams(max_new_tokens=9, **given)
    assert (asked.stop, asked.num_answers, asked.num_logprobs) == (("a", "b"), 3, 0)
    assert question(top_k=-1).sampling.top_k == 0
    assert question(seed=-1, n=2).sampling.seed is None
    assert question(max_tokens=5, stop="a").stop == ("a",)


def test_choices_need_no_stop() -> None:
    for name in ("answer_choices", "guided_choice"):
        asked = question(**{name: ["yes", "no"]}, stop="y")

        assert (only(asked).task, asked.stop) == (OneOf(("yes", "no")), ())


@pytest.mark.parametrize(
    ("messages", "turns", "num_ignored"),
    [
        ([LOOK, user("Hello"), RED, user("Why?")], (("system", "Look."), ("user", "Hello"), ("assistant", "Red.")), 0),
        ([LOOK, user("Hello", image()), RED, user("Why?")], (("system", "Look."),), 2),
        ([user("Hello"), calling(), result(), user("Why?")], (("user", "Hello"),), 2),
    ],
)
def test_a_template_with_turns_shows_the_earlier_ones_of_a_text_chat(
    messages: list[Any], turns: tuple[tuple[str, str], ...], num_ignored: int
) -> None:
    asked = question(*messages, info=dataclasses.replace(INFO, template="conversation"))
    assert (only(asked).turns, asked.num_ignored_turns) == (turns, num_ignored)
    assert only(question(*messages)).turns == ()


def test_a_choice_of_a_text_chat_has_its_earlier_turns() -> None:
    info = dataclasses.replace(INFO, template="conversation")
    form = json_schema({"a": {"type": "boolean"}})
    for picture, turns in (((), (("user", "Hello"), ("assistant", "Red."))), ((image(),), ())):
        asked = question(user("Hello", *picture), RED, user("Why?"), info=info, response_format=form)
        assert (only(asked).turns, only(asked).task) == (turns, OneOf(("yes", "no")))


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
        ("What?", {"instructions": "Look."}, "What?"),
        ([item("user", NEW)], {}, "default"),
        ([item("developer", "Look."), item("user", NEW, "One", "two", type="message")], {}, "One\ntwo"),
        ([{"role": "user", "content": "What?"}], {"instructions": "Look."}, "What?"),
    ],
)
def test_the_last_text_alone_is_the_question_of_responses(
    content: Any, parameters: dict[str, Any], prompt: Any
) -> None:
    assert only(question_of_responses(content, **parameters)).prompt("default") == prompt


def test_responses_have_the_newest_picture_and_the_parameters_of_the_request() -> None:
    earlier = item("assistant", "Red.", type="message", id="msg_1", status="completed", phase=None)
    asked = question_of_responses(
        [item("user", OLD, "What?"), earlier, item("user", "Why?", OLD, NEW)],
        instructions="Look.",
        **{"temperature": 0.5, "top_p": 0.25, "top_k": 3, "seed": 7, "max_output_tokens": 9},
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
    )

    assert (asked.urls, asked.picture_used) == ((NEW,), "input[2].content[2]")
    assert asked.num_ignored_turns == 3
    assert asked.sampling == SamplingParams(max_new_tokens=9, temperature=0.5, top_p=0.25, top_k=3, seed=7)
    assert asked.num_logprobs == 0


@pytest.mark.parametrize(
    ("output", "place"),
    [
        ([{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": NEW}], "[1]"),
        ([None, "a", {"type": "image_url", "image_url": {"url": NEW}, "cache_control": {}}], "[2]"),
        ([{"image_url": {"url": NEW}}], "[0]"),
        ({"image_url": NEW, "type": None, "detail": "auto", "file_id": None, "text": None}, ""),
        ({"type": "input_image", "image_url": NEW, "file_id": "file_1"}, ""),
        ({"type": "computer_screenshot", "image_url": NEW, "file_id": None}, ""),
        # No pictures:
        ([{"type": "search_result", "image_url": NEW}, {"title": "Red", "image_url": NEW}], None),
        ([{"type": ["image_url"], "image_url": NEW}, {"type": "input_image", "image_url": 5}, {}], None),
        ({"type": "computer_screenshot", "file_id": "file_1"}, None),
        ("data:,", None),
        (None, None),
    ],
)
def test_a_picture_of_a_tool_counts_in_responses_as_in_chats(output: Any, place: str | None) -> None:
    items = [item("user", OLD, "What?"), {"type": "function_call_output", "call_id": "c", "output": output}]
    asked = question_of_responses(items)

    assert (only(asked).instruction, asked.num_ignored_turns) == ("What?", 1)
    assert asked.urls == ((OLD,) if place is None else (NEW,))
    assert asked.picture_used == (None if place is None else f"input[1].output{place}")


def test_a_model_that_sees_pictures_as_tokens_sees_none_of_tools() -> None:
    form = PictureFormat(token="<image>", token_id=9, tokens_each=10)
    info = dataclasses.replace(INFO, has_adapter=False, template="chat", picture_format=form)
    messages = user("A star?"), calling(), result(content=[image(NEW)])
    schema = json_schema({"a": {"type": "string", "description": "What?"}, "b": {"type": "string"}})
    asked = question(*messages, info=info, response_format=schema)
    assert (asked.urls, asked.num_ignored_turns, asked.properties) == ((), 2, ())
    with pytest.raises(ApiError, match="asks nothing"):
        question(user(" "), *messages[1:], info=info)
