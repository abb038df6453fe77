"""What a chat request may hold: neutral values pass, others are refused by name, and nothing sent is quoted."""

import asyncio
import json
from typing import Any

import pytest

from llama_adapter.app.http_api.parsing import MAX_SEPARATORS, parse_chat_request
from llama_adapter.app.http_api.problems import ApiError
from llama_adapter.app.http_api.schemas import MAX_STOPS, NEUTRAL_VALUES, ChatRequest, NeutralParameters
from tests.app.http_api.requests import chat, image, user

SECRET = "Xyzzy-secret"


def parsed(content: Any) -> ChatRequest:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return asyncio.run(parse_chat_request(bytearray(body)))


def refusal(content: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parsed(content)
    return caught.value


@pytest.mark.parametrize("name", sorted(NeutralParameters.model_fields))
def test_a_parameter_that_is_not_supported_passes_at_its_neutral_value_and_as_null(name: str) -> None:
    parsed(chat(**{name: None}))
    if name in NEUTRAL_VALUES:
        parsed(chat(**{name: json.loads(NEUTRAL_VALUES[name])}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("n", "1"),
        ("logprobs", True),
        ("logprobs", 0),
        ("top_logprobs", 3),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("logit_bias", {"50": 1}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "a"}),
        ("prediction", {}),
        ("reasoning_effort", "high"),
        ("store", True),
        ("metadata", {"a": "b"}),
    ],
)
def test_a_parameter_that_is_not_supported_is_refused_by_name_and_told_how_to_send_it(name: str, value: Any) -> None:
    error = refusal(chat(**{name: value}))

    assert (error.http_status, error.code, error.param) == (400, "unsupported_parameter", name)
    assert NEUTRAL_VALUES.get(name, "null") in error.message


@pytest.mark.parametrize(
    ("content", "code", "param"),
    [
        (b"{", "invalid_json", None),
        (b"\xff", "invalid_json", None),
        (b'{"model": "\\ud800"}', "invalid_json", None),
        (b'{"model": "m", "messages": [], "temperature": NaN}', "invalid_json", None),
        (b"[" * 100_000, "request_too_complex", None),
        (b"[" * 1000 + b"]" * 1000, "invalid_json", None),
        ([], "invalid_type", None),
        ({"messages": [user(image())]}, "missing_required_parameter", "model"),
        ({"model": "m"}, "missing_required_parameter", "messages"),
        (chat(user(image()), temperature=2.5), "invalid_value", "temperature"),
        (chat(user(image()), temperature="0"), "invalid_value", "temperature"),
        (chat(user(image()), max_tokens=0), "invalid_value", "max_tokens"),
        (chat(user(image()), seed=2**64), "invalid_value", "seed"),
        (chat(user(image()), stop=["a"] * (MAX_STOPS + 1)), "invalid_value", "stop"),
        (chat(user(image()), stop=["a", ""]), "invalid_value", "stop[1]"),
        (chat(user(image()), answer_choices=["a"]), "invalid_value", "answer_choices"),
        (chat(user(image()), colour="red"), "unknown_parameter", "colour"),
        (chat(user({**image(), "size": 1})), "unknown_parameter", "messages[0].content[0].size"),
        (chat({"role": "tool", "content": "a"}), "invalid_value", "messages[0]"),
        (chat({"role": "user", "content": 5}), "invalid_value", "messages[0].content"),
        (chat({"role": "user", "content": []}), "invalid_value", "messages[0].content"),
        (chat({"role": "system", "content": [image()]}), "invalid_value", "messages[0].content[0].type"),
        (chat(user(image()), user("a", image(""))), "invalid_value", "messages[1].content[1].image_url.url"),
        (chat(user({"type": "input_audio"})), "invalid_value", "messages[0].content[0]"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong_and_where(content: Any, code: str, param: str | None) -> None:
    error = refusal(content)

    assert (error.http_status, error.code, error.param) == (400, code, param)


@pytest.mark.parametrize(
    "content",
    [
        SECRET.encode(),
        f'{{"{SECRET}'.encode(),
        SECRET,
        chat(**{f"{SECRET} is no name": 1}),
        chat(model=[SECRET]),
        chat(n=SECRET),
        chat(tools=[SECRET]),
        chat(temperature=SECRET),
        chat(stop=[SECRET * 50]),
        chat({"role": SECRET, "content": SECRET}),
        chat({"role": "user", "content": {SECRET: SECRET}}),
        chat(user({"type": SECRET})),
        chat(user({"type": "image_url", "image_url": {"url": [SECRET]}})),
        chat(user({"type": "image_url", "image_url": {"url": SECRET, "detail": SECRET}})),
        chat(response_format={"type": SECRET}),
        chat(logit_bias={SECRET: SECRET}),
    ],
)
def test_no_error_quotes_what_was_sent(content: Any) -> None:
    error = refusal(content)

    assert SECRET.encode() not in error.body()


def test_whole_numbers_may_be_written_with_a_point() -> None:
    assert parsed(chat(seed=3.0, max_tokens=5.0)).seed == 3


def test_large_bodies_are_parsed_as_small_ones() -> None:
    picture = "data:image/png;base64," + "A" * 300_000

    assert parsed(chat(user(image(picture)))).messages[0].content[0].image_url.url == picture


def test_texts_with_as_many_commas_as_a_prompt_may_have_pass() -> None:
    text = "," * 20_000

    assert parsed(chat(user(image(), text))).messages[0].content[1].text == text
    assert MAX_SEPARATORS > 20_000
