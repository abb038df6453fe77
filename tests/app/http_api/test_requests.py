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


UNSUPPORTED = {
    "n": [2, True, "1"],
    "logprobs": [True, 0],
    "top_logprobs": [3],
    "frequency_penalty": [0.5],
    "presence_penalty": [-1],
    "logit_bias": [{"50": 1}],
    "tools": [[{"type": "function"}]],
    "tool_choice": ["required"],
    "functions": [[{}]],
    "response_format": [{"type": "json_object"}],
    "modalities": [["text", "audio"]],
    "audio": [{"voice": "a"}],
    "prediction": [{}],
    "reasoning_effort": ["high"],
    "store": [True],
    "metadata": [{"a": "b"}],
}
INVALID = [
    b"",
    b"{",
    b"\xff",
    json.dumps(chat()).encode("utf-16"),
    b'{"model": "\\ud800"}',
    b'{"model": "m", "messages": [], "temperature": NaN}',
    b'{"seed": ' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b"[" * 1000 + b"]" * 1000,
    [],
    {"messages": [user(image())]},
    {"model": "m"},
    chat(user(image()), temperature=2.5),
    chat(user(image()), temperature="0"),
    chat(user(image()), max_tokens=0),
    chat(user(image()), seed=2**64),
    chat(user(image()), stop=["a"] * (MAX_STOPS + 1)),
    chat(user(image()), stop=["a", ""]),
    chat(user(image()), answer_choices=["a"]),
    chat(user(image()), answer_choices=["a", "a"]),
    chat(user(image()), colour="red"),
    chat(user({**image(), "size": 1})),
    chat({"role": "tool", "content": "a"}),
    chat({"role": "user", "content": 5}),
    chat({"role": "user", "content": []}),
    chat({"role": "system", "content": [image()]}),
    chat(user(image()), user("a", image(""))),
    chat(user({"type": "input_audio"})),
]


def test_error_bodies(api: TestClient, snapshot: Any) -> None:
    bodies = [chat(**{name: value}) for name, values in UNSUPPORTED.items() for value in values] + INVALID
    responses = [sent(api, body) for body in bodies]

    assert {response.status_code for response in responses} == {400}
    assert [response.json()["error"] for response in responses] == snapshot


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
