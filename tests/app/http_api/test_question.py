"""How messages become one question about one picture."""

from typing import Any

import pytest

from llama_adapter.app.http_api.chat import ChatQuestion, understand
from llama_adapter.app.http_api.errors import ApiError
from llama_adapter.app.http_api.schemas import chat_request
from llama_adapter.app.tasks.choose import OneOf
from llama_adapter.app.tasks.task import FREE_TEXT
from llama_adapter.llm.engine.sampling_params import SamplingParams
from tests.app.http_api.requests import chat, image, user


def question(*messages: dict[str, Any], **parameters: Any) -> ChatQuestion:
    return understand(chat_request().model_validate(chat(*messages, **parameters)))


def system(text: str, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": text}


def assistant(text: str | None) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([user(image(), "What?")], "What?"),
        ([user("What?", image())], "What?"),
        ([user("One", image(), "two")], "One\ntwo"),
        ([user(image())], "default"),
        ([user(image(), " \n")], "default"),
        ([system("Look."), user(image(), "What?")], ("Look.", "What?")),
        ([system("Look.", "developer"), user(image(), "What?")], ("Look.", "What?")),
        ([system("Look."), system("Think."), user(image(), "What?")], ("Look.\nThink.", "What?")),
        ([system("Look."), user(image())], "Look."),
        ([system(" "), user(image(), "What?")], "What?"),
        ([user(image()), {"role": "user", "content": "What?"}], "What?"),
    ],
)
def test_the_last_text_is_the_instruction_or_the_input_to_a_system_text(messages: list[Any], prompt: Any) -> None:
    assert question(*messages).question.prompt("default") == prompt


@pytest.mark.parametrize(
    ("messages", "num_ignored"),
    [
        ([user(image(), "What?")], 0),
        ([system("Look."), user(image(), "What?")], 0),
        ([user(image()), user("What?")], 0),  # of the first there is nothing but the picture, which is used
        ([user(image(), "What?"), assistant("Red."), user("And?")], 2),
        ([user(image(), "What?"), assistant(None), user("And?")], 1),
        ([user(image()), assistant("Red."), user(image(), "And?")], 2),
    ],
)
def test_earlier_messages_are_counted_when_something_of_them_is_not_shown(
    messages: list[Any], num_ignored: int
) -> None:
    assert question(*messages).num_ignored_turns == num_ignored


def test_a_follow_up_is_about_the_newest_picture() -> None:
    old, new = image("data:image/png;base64,b2xk"), image("data:image/png;base64,bmV3")

    asked = question(user(old, "What?"), assistant("Red."), user(new), assistant("Blue."), user("Why?"))

    assert asked.picture_url == "data:image/png;base64,bmV3"


@pytest.mark.parametrize(
    ("messages", "parameters", "code", "param"),
    [
        ([user("What?")], {}, "missing_image", "messages"),
        ([user(image(), "What?"), assistant("Red.")], {}, "invalid_value", "messages"),
        ([user(image(), "What?"), system("Look.")], {}, "invalid_value", "messages"),
        ([user(image(), image(), "What?")], {}, "too_many_images", "messages[0].content"),
        ([user(image()), user(image(), image())], {}, "too_many_images", "messages[1].content"),
        ([user(image())], {"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ([user(image())], {"max_tokens": 3, "max_completion_tokens": 4}, "invalid_value", "max_tokens"),
    ],
)
def test_what_is_no_question_about_one_picture_is_refused(
    messages: list[Any], parameters: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        question(*messages, **parameters)

    assert (caught.value.http_status, caught.value.code, caught.value.param) == (400, code, param)


def test_more_pictures_than_one_are_no_matter_in_messages_before_the_newest_picture() -> None:
    assert question(user(image(), image()), user(image(), "What?")).num_ignored_turns == 1


def test_nothing_given_and_null_mean_the_defaults_of_the_product() -> None:
    given = question()
    null = question(**dict.fromkeys(("temperature", "top_p", "top_k", "seed", "stop", "max_tokens", "answer_choices")))

    assert given.sampling == null.sampling == SamplingParams()
    assert (given.stop, given.question) == (null.stop, null.question)
    assert (given.stop, given.question.task) == ((), FREE_TEXT)


def test_parameters_arrive_as_they_are_given() -> None:
    asked = question(temperature=0.5, top_p=0.25, top_k=3, seed=-7, max_completion_tokens=9, stop=["a", "b"])

    assert asked.sampling == SamplingParams(max_new_tokens=9, temperature=0.5, top_p=0.25, top_k=3, seed=-7)
    assert asked.stop == ("a", "b")
    assert question(max_tokens=5, stop="a").stop == ("a",)


def test_choices_need_no_stop() -> None:
    asked = question(answer_choices=["yes", "no"], stop="y")

    assert (asked.question.task, asked.stop) == (OneOf(("yes", "no")), ())
