"""What a chat request may hold: neutral values pass, others are refused by name, and no error quotes the request."""

import json
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from llama_adapter.app.http_api.api import ApiSettings, create_api
from llama_adapter.app.http_api.guards import MAX_SEPARATORS
from llama_adapter.app.http_api.schemas import MAX_STOPS, ChatRequest, NeutralParameters
from tests.app.http_api.live import StubService
from tests.app.http_api.requests import chat, image, user

CHAT = "/v1/chat/completions"
SECRET = "Xyzzy-secret"
NEUTRAL = {
    "n": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "functions": [],
    "function_call": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "reasoning_effort": "none",
    "verbosity": "medium",
    "service_tier": "auto",
    "store": False,
    "metadata": {},
}


@pytest.fixture(scope="module")
def api() -> TestClient:
    """Without a socket."""
    application = create_api(StubService(), settings=ApiSettings())  # type: ignore[arg-type]
    return TestClient(application, base_url="http://localhost")


def sent(api: TestClient, content: Any, *, kind: str = "application/json") -> httpx.Response:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return api.post(CHAT, content=body, headers={"content-type": kind} if kind else {})


def error(response: httpx.Response) -> tuple[int, str, str | None]:
    told = response.json()["error"]
    assert set(told) == {"message", "type", "param", "code"}
    return response.status_code, told["code"], told["param"]


@pytest.mark.parametrize("name", sorted(NeutralParameters.model_fields))
def test_an_unsupported_parameter_passes_at_its_neutral_value_and_as_null(name: str) -> None:
    ChatRequest.model_validate(chat(**{name: None}))
    ChatRequest.model_validate(chat(**{name: NEUTRAL.get(name)}))


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
def test_an_unsupported_value_is_refused_by_name(api: TestClient, name: str, value: Any) -> None:
    assert error(sent(api, chat(**{name: value}))) == (400, "unsupported_parameter", name)


@pytest.mark.parametrize(
    ("content", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"{", "invalid_json", None),
        (b"\xff", "invalid_json", None),
        (json.dumps(chat()).encode("utf-16"), "invalid_json", None),
        (b'{"model": "\\ud800"}', "invalid_json", None),
        (b'{"model": "m", "messages": [], "temperature": NaN}', "invalid_json", None),
        (b'{"seed": ' + b"9" * 5000 + b"}", "invalid_json", None),
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
        (chat(user(image()), answer_choices=["a", "a"]), "invalid_value", "answer_choices"),
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
def test_an_invalid_request_is_told_what_is_wrong_and_where(
    api: TestClient, content: Any, code: str, param: str | None
) -> None:
    assert error(sent(api, content)) == (400, code, param)


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "text/plain; application/json", "text/json", "application/json-x", "multipart/form-data"]
)
def test_a_body_that_a_page_of_another_site_can_send_is_refused(api: TestClient, kind: str) -> None:
    assert error(sent(api, chat(), kind=kind)) == (415, "unsupported_media_type", None)
    assert error(sent(api, b"", kind=kind))[0] == 400


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_is_accepted(api: TestClient, kind: str) -> None:
    assert sent(api, chat(), kind=kind).status_code == 200


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
def test_no_error_quotes_the_request(api: TestClient, content: Any) -> None:
    response = sent(api, content)

    assert response.status_code == 400
    assert SECRET not in response.text


def test_whole_numbers_may_have_a_point() -> None:
    assert ChatRequest.model_validate(chat(seed=3.0, max_tokens=5.0)).seed == 3


def test_texts_with_as_many_commas_as_a_prompt_may_have_pass(api: TestClient) -> None:
    assert MAX_SEPARATORS > 20_000
    assert sent(api, chat(user(image(), "," * 20_000))).status_code == 200
