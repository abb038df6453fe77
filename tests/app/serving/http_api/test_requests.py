"""What a request may contain: neutral values pass, others are refused by name, and no error quotes the request."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from starlette.testclient import TestClient

from llama_adapter.app.captioning.tasks.prompts import Dialogue
from llama_adapter.app.serving.http_api import conversation
from llama_adapter.app.serving.http_api.api import forms
from llama_adapter.app.serving.http_api.guards import MAX_SEPARATORS, GuardSettings
from llama_adapter.app.serving.http_api.schemas import (
    IGNORED,
    MAX_ANSWERS,
    MAX_STOPS,
    UNSUPPORTED,
    UNSUPPORTED_IN_RESPONSES,
)
from llama_adapter.app.serving.online.types import BusyError
from llama_adapter.llm.errors import PromptTooLongError
from llama_adapter.llm.picture_format import PictureFormat
from tests.app.golden import ROOT
from tests.app.serving.http_api.live import StubService, api_of, error, failed, raising
from tests.app.serving.http_api.requests import (
    CHAT,
    EXAMPLE_PICTURE,
    RED_STAR,
    RESPONSES,
    chat,
    data_uri,
    image,
    json_schema,
    user,
)

SECRET = "Xyzzy-secret"
FORMS = tuple(forms().values())
CHAT_FORM, RESPONSES_FORM, _ = FORMS
# Parameters by their effect: the neutral values of unsupported ones, ignored ones, and values that are refused.
PARAMETERS = json.loads(Path(__file__).with_name("parameters.json").read_text())


@pytest.fixture(scope="module")
def api() -> TestClient:
    return api_of(StubService())


def sent(api: TestClient, content: Any, *, kind: str = "application/json", path: str = CHAT) -> httpx.Response:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return api.post(path, content=body, headers={"content-type": kind} if kind else {})


def responses(content: Any = "What?", **parameters: Any) -> dict[str, Any]:
    return {"model": "default", "input": content, **parameters}


@pytest.mark.parametrize("name", sorted({*UNSUPPORTED, *UNSUPPORTED_IN_RESPONSES, "response_format", "tool_choice"}))
def test_an_unsupported_parameter_passes_at_its_neutral_value_and_as_null(name: str) -> None:
    for value in (None, (PARAMETERS["chat"]["neutral"] | PARAMETERS["responses"]["neutral"]).get(name)):
        RESPONSES_FORM.request.model_validate(responses(**{name: value}))
        if name not in UNSUPPORTED_IN_RESPONSES:
            CHAT_FORM.request.model_validate(chat(**{name: value}))


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_tool_is_the_reason_of_a_refusal_beside_what_comes_with_it(api: TestClient, path: str) -> None:
    body = chat() if path == CHAT else responses()
    came = sent(api, {**body, "tool_choice": "required", "tools": [{"type": "function"}]}, path=path)
    assert error(came) == (400, "unsupported_parameter", "tools")
    assert "This server calls no tools" in came.text


@pytest.mark.parametrize(
    ("parameters", "status"),
    [
        ({"tool_choice": "none", "tools": [{"type": "function"}]}, 200),
        ({"tool_choice": "none"}, 200),
        ({"tool_choice": "auto", "tools": []}, 200),
        ({"tool_choice": "auto", "tools": None}, 200),
        ({"tool_choice": None, "tools": [{"type": "function"}]}, 400),
        ({"tools": [{"type": "function"}]}, 400),
    ],
)
def test_the_schema_says_when_tools_are_accepted(api: TestClient, parameters: dict[str, Any], status: int) -> None:
    schema = api.get("/openapi.json").json()
    completion = {"prompt": "It is"}
    for path, name, body in (
        (CHAT, "ChatRequest", chat()),
        (RESPONSES, "ResponsesRequest", responses()),
        ("/v1/completions", "CompletionRequest", completion),
    ):
        own = {"$ref": f"#/components/schemas/{name}", "components": schema["components"]}
        assert jsonschema.Draft202012Validator(own).is_valid({**body, **parameters}) == (status == 200)
        assert sent(api, {**body, **parameters}, path=path).status_code == status


@pytest.mark.parametrize(
    ("effort", "status"), [("none", 200), ("minimal", 200), ("low", 200), ("medium", 400), ("high", 400)]
)
def test_efforts_that_ask_for_little_reasoning_are_accepted(api: TestClient, effort: str, status: int) -> None:
    assert sent(api, chat(reasoning_effort=effort)).status_code == status
    assert sent(api, responses(reasoning={"effort": effort}), path=RESPONSES).status_code == status


def test_the_page_names_every_parameter() -> None:
    page = (ROOT / "docs" / "http-api.md").read_text()

    named = {name for form in FORMS for name in form.request.model_fields} - {"stream_options"}
    assert [name for name in sorted(named) if not re.search(rf"[`\".]{name}\b", page)] == []


def test_null_is_absent_everywhere(api: TestClient) -> None:
    absent = dict.fromkeys((*CHAT_FORM.request.model_fields, "guided_choice", "answer_choices", "unknown"))
    nested = {
        "response_format": {"type": "text", "json_schema": None},
        "stream_options": {"include_usage": None, "unknown": None},
        "metadata": {"a": None, "b": "c"},
    }
    format_ = {"type": "text", "name": None, "schema": None}

    assert sent(api, {**absent, **chat()}).status_code == 200
    assert sent(api, chat(**nested, stream=True)).status_code == 200
    assert error(sent(api, {**absent, "model": "default"})) == (400, "missing_required_parameter", "messages")
    usage = {"include_usage": True, "unknown": None}
    given = {"metadata": {"a": None, "b": "c"}, "text": {"format": format_}, "stream_options": usage}
    came = sent(api, responses(**given), path=RESPONSES)
    assert (came.status_code, came.json()["metadata"]) == (200, {"b": "c"})


def test_calls_of_tools_and_reasoning_are_history_in_responses(api: TestClient) -> None:
    items = [
        {"role": "user", "content": "Hello"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "of another server", "role": ["odd"]},
        {"role": "user", "content": "What?"},
    ]
    came = sent(api, responses(items, instructions="Look."), path=RESPONSES)

    assert (came.status_code, came.headers["x-ignored-turns"]) == (200, "6")


def test_other_servers_parameters_without_effect_are_accepted(api: TestClient) -> None:
    ignored = PARAMETERS["chat"]["ignored"]
    assert ignored.keys() == {*IGNORED, "metadata", "parallel_tool_calls"}
    assert sent(api, chat(**ignored)).status_code == 200
    assert sent(api, responses(**ignored), path=RESPONSES).json()["metadata"] == {"a": "b"}
    marked = b"\xef\xbb\xbf" + json.dumps(responses()).encode()  # a byte order mark
    assert sent(api, marked, path=RESPONSES).status_code == 200


INVALID = [
    b"{",
    b"\xff",
    b'{"model": "\\ud800"}',
    b'{"model": "m", "messages": [], "temperature": NaN}',
    b'{"seed": ' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    [],
    {"model": "m"},
    chat(user(image()), temperature=2.5),
    chat(user(image()), temperature="0"),
    chat(user(image()), max_tokens=0),
    chat(user(image()), seed=2**64),
    chat(user(image()), stop=["a"] * (MAX_STOPS + 1)),
    chat(user(image()), stop=["a", ""]),
    chat(user(image()), answer_choices=["a"]),
    chat(user(image()), answer_choices=["a", "a"]),
    chat(n=True),
    chat(n=MAX_ANSWERS + 1),
    chat(logprobs=0),
    chat(guided_choice=["a", "b"], answer_choices=["a", "b"]),
    chat(user(image()), colour="red"),
    chat({"role": "tool", "content": "a"}),
    chat({"role": "user", "content": 5}),
    chat({"role": "user", "content": "What?", "images": ["aGk="]}),
    chat({"role": "user", "content": []}),
    chat({"role": "system", "content": [image()]}),
    chat(user(image()), user("a", image(""))),
    chat(user({"type": "input_audio"})),
    chat(tools=[1]),
    chat(store=True),
    chat(response_format={"type": "json_schema", "name": "a", "schema": {}}),
    chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": "{}"}}),
    chat(response_format={"type": "json_schema", "json_schema": {"schema": {}, "colour": 1}}),
    chat(response_format={"type": "json_schema", "json_schema": {"schema": {}, "strict": 5}}),
    chat(response_format={}),
    chat(guided_json=5),
    chat(structured_outputs={"choice": ["a", "b"]}, answer_choices=["a", "b"]),
]
INVALID_RESPONSES = [
    {"model": "m"},
    responses([]),
    responses(""),
    responses(colour="red"),
    responses(max_output_tokens=0),
    responses(include=["file_search_call.results"]),
    responses(text={"format": {"type": "json_schema", "name": "a", "schema": {"type": "array"}}}, guided_regex="a"),
    responses(text={"format": {"type": "json_schema", "json_schema": {"schema": {}}}}),
    responses(text={"verbosity": "low"}),
    responses(reasoning={"effort": "low", "summary": "detailed"}),
    responses([{"type": "item_reference", "id": "msg_1"}]),
    responses([{"type": "function_call_output", "call_id": "a", "output": "b"}]),
    responses([{"role": "user", "content": "a"}, {"type": "function_call", "name": "f", "arguments": "{}"}]),
    responses([{"role": "user", "content": [{"type": "input_image"}]}]),
    responses([{"role": "user", "content": [{"type": "input_image", "image_url": "data:,", "file_id": "file_1"}]}]),
    responses([{"role": "user", "content": [{"type": "input_file", "file_id": "file_1"}]}]),
    responses([{"role": "assistant", "content": [{"type": "output_text", "text": 5}]}]),
    responses([{"role": "system", "content": [{"type": "input_text"}]}]),
    responses([{"role": "assistant", "content": "Red."}]),
]


@pytest.mark.parametrize(
    ("path", "form", "kind", "invalid"),
    [(CHAT, chat, "chat", INVALID), (RESPONSES, responses, "responses", INVALID_RESPONSES)],
    ids=["chat", "responses"],
)
def test_error_bodies(
    api: TestClient, snapshot: Any, path: str, form: Callable[..., Any], kind: str, invalid: list[Any]
) -> None:
    for name, value in PARAMETERS[kind]["unsupported"].items():
        assert error(sent(api, form(**{name: value}), path=path)) == (400, "unsupported_parameter", name)
    came = [sent(api, body, path=path) for body in invalid]

    assert {response.status_code for response in came} == {400}
    told = [response.json()["error"] for response in came]
    assert [f"{one['code']} {one['param']}: {one['message']}" for one in told] == snapshot


def test_likeliest_tokens_need_log_probabilities(api: TestClient) -> None:
    assert sent(api, chat(top_logprobs=20, logprobs=True)).status_code == 200
    assert error(sent(api, chat(top_logprobs=21, logprobs=True))) == (400, "invalid_value", "top_logprobs")
    assert error(sent(api, chat(top_logprobs=2))) == (400, "invalid_value", "top_logprobs")
    assert sent(api, chat(top_logprobs=0)).status_code == 200
    include = ["message.output_text.logprobs"]
    assert sent(api, responses(top_logprobs=2, include=include), path=RESPONSES).status_code == 200
    assert error(sent(api, responses(top_logprobs=2), path=RESPONSES)) == (400, "invalid_value", "top_logprobs")


def test_a_proxy_may_offer_the_server_at_a_path() -> None:
    api = api_of(StubService(), guards=GuardSettings(root_path="/pictures", api_keys=("a-long-enough-key",)))
    key = {"authorization": "Bearer a-long-enough-key"}

    for path in ("/v1/models", "/pictures/v1/models", "/pictures/docs", "/docs", "/openapi.json"):
        assert api.get(path, headers=key).status_code == 200
        assert api.get(path).status_code == (401 if "/v1/" in path else 200)
        for wrong in (f"/pictures{path}" if path.startswith("/pictures") else f"/pictured{path}", "/picturesv1/models"):
            assert api.get(wrong, headers=key).status_code == 404
    assert api.get("/pictures", follow_redirects=False).headers["location"] == "/pictures/"
    assert '"/pictures/openapi.json"' in api.get("/docs").text.replace("'", '"')
    static = re.findall(r"/pictures(/static[^\"]+js)", api.get("/docs").text)
    assert [api.get(f"{prefix}{one}").status_code for one in static for prefix in ("", "/pictures")] == [200, 200]


@pytest.mark.parametrize(("given", "names"), [((), ["stub"]), (("a/b", "c"), ["a/b", "c"])])
def test_the_model_has_its_own_name_or_those_of_the_server_and_an_alias(
    given: tuple[str, ...], names: list[str]
) -> None:
    service = StubService()
    api = api_of(service, model_names=given)
    listed = api.get("/v1/models").json()["data"]

    assert [model["id"] for model in listed] == names
    assert [api.get(f"/v1/models/{name}").json() for name in (*names, "default")] == [*listed, listed[0]]
    for name, shown in (*zip(names, names, strict=True), ("default", names[0]), ("", names[0]), (None, names[0])):
        assert sent(api, chat() | {"model": name}).json()["model"] == shown
    for wrong in ("gpt/4", *({"stub"} - {*names})):
        for response in (api.get(f"/v1/models/{wrong}"), sent(api, chat() | {"model": wrong})):
            assert error(response) == (404, "model_not_found", "model")
    assert listed[0]["max_model_len"] == service.info.context
    assert listed[0]["architecture"] == {"input_modalities": ["text", "image"], "output_modalities": ["text"]}
    service.info = dataclasses.replace(service.info, has_adapter=False)
    assert api.get("/v1/models/default").json()["architecture"]["input_modalities"] == ["text"]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_no_response_is_stored(api: TestClient, method: str) -> None:
    assert error(api.request(method, f"{RESPONSES}/resp_1"))[:2] == (404, "response_not_found")


@pytest.mark.parametrize(
    "path", ["/chat/completions", "/responses", "/models", "/v1/v1/models", "/v1/v1/completions", "/completions"]
)
def test_a_wrong_base_url_is_told_the_right_one(api: TestClient, path: str) -> None:
    came = api.post(path, json=chat())

    assert error(came)[:2] == (404, "not_found")
    assert "base URL" in came.json()["error"]["message"]


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "text/plain; application/json", "text/json", "application/json-x", "multipart/form-data"]
)
def test_a_body_that_a_page_of_another_site_can_send_is_refused(api: TestClient, kind: str) -> None:
    assert error(sent(api, chat(), kind=kind)) == (415, "unsupported_media_type", None)
    assert error(sent(api, b"", kind=kind))[0] == 400


def test_json_is_accepted_and_whole_numbers_may_have_a_point(api: TestClient) -> None:
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        assert sent(api, chat(), kind=kind).status_code == 200
    assert CHAT_FORM.request.model_validate(chat(seed=3.0, max_tokens=5.0)).seed == 3
    assert CHAT_FORM.request.model_validate(chat(max_tokens=-1)).max_tokens == 2**31 - 1  # until the context is full


@pytest.mark.parametrize(
    "content",
    [
        SECRET.encode(),
        SECRET,
        chat(**{f"{SECRET} is no name": 1}),
        chat(model=[SECRET]),
        chat(n=SECRET),
        chat(tools=[SECRET]),
        chat(stop=[SECRET * 50]),
        chat({"role": SECRET, "content": SECRET}),
        chat(user({"type": SECRET})),
        chat(user({"type": "image_url", "image_url": {"url": [SECRET]}})),
        chat(user({"type": "image_url", "image_url": {"url": SECRET, "detail": SECRET}})),
        chat(response_format={"type": SECRET}),
        chat(logit_bias={SECRET: SECRET}),
        chat(response_format=json_schema({SECRET: {"type": SECRET}})),
        chat(response_format=json_schema({"a": {"type": "string", SECRET: SECRET}})),
        chat(response_format=json_schema({"a": {"enum": [SECRET, SECRET]}})),
    ],
)
def test_no_error_quotes_the_request(api: TestClient, content: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "find_spec", lambda name: None)  # so that schemas are refused
    response = sent(api, content)

    assert response.status_code == 400
    assert SECRET not in response.text


def test_texts_with_as_many_commas_as_a_prompt_may_have_pass(api: TestClient) -> None:
    assert MAX_SEPARATORS > 20_000
    assert sent(api, chat(user(image(), "," * 20_000))).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "places"),
    [
        (CHAT, chat(), ("messages", "messages")),
        (RESPONSES, responses([user(image())]), ("input", "input")),
        ("/v1/completions", {"prompt": "It is", "image_url": EXAMPLE_PICTURE}, ("image_url", "prompt")),
    ],
)
def test_errors_have_a_status_and_name_the_fields_of_their_format_streamed_or_not(
    path: str, body: dict[str, Any], places: tuple[str, str], stream: bool
) -> None:
    service = StubService()
    api = api_of(service)
    for on_submit, expected, retry_after in (
        (lambda handle: handle.deliver(failed("unreadable")), (400, "unreadable", places[0]), None),
        (lambda handle: handle.deliver(failed("engine_failed")), (500, "engine_failed", None), None),
        (raising(PromptTooLongError(600, 512)), (400, "context_length_exceeded", places[1]), None),
        (raising(BusyError("Full", retry_after_s=0.2)), (429, "busy", None), "1"),
    ):
        service.on_submit = on_submit
        came = sent(api, {**body, "stream": stream}, path=path)
        assert (error(came), came.headers.get("retry-after")) == (expected, retry_after)
    malformed = json.loads(json.dumps(body).replace(EXAMPLE_PICTURE, "data:image/png;base64,!"))
    assert error(sent(api, malformed, path=path)) == (400, "invalid_base64_image", places[0])


def test_a_model_that_sees_pictures_as_tokens_sees_all_of_them_in_their_places() -> None:
    service = StubService()
    form = PictureFormat(token="<image>", token_id=9, tokens_each=10)
    service.info = dataclasses.replace(service.info, has_adapter=False, template="chat", picture_format=form)
    api = api_of(service)
    said = {"role": "assistant", "content": "A square."}
    red, star = image(), image(data_uri(RED_STAR.read_bytes()))
    system, last = {"role": "system", "content": "Be brief."}, user(star, "And", red, "these?", "Why?")

    reply = api.post(CHAT, json=chat(system, user(red, "What is it?"), said, last)).json()

    assert "picture_used" not in reply
    (ask,) = service.asks
    assert ask.prompt == Dialogue(
        (("system", "Be brief."), ("user", "What is it?"), ("assistant", "A square.")),
        "Andthese?\nWhy?",
        ((), (0,), (), (0, 3)),
    )
    assert ask.pictures[0] == ask.pictures[2]
    assert ask.pictures[1] == RED_STAR.read_bytes()
    for parts, prompt in (
        ((red,), service.info.default_prompt),
        ((" ", red), service.info.default_prompt),
        ((red, "What?"), "What?"),
        (("What?", red), Dialogue((), "What?", ((5,),))),
    ):
        api.post(CHAT, json=chat(user(*parts)))
        assert service.asks[-1].prompt == prompt
    api.post(
        CHAT,
        json=chat(user(red, "Hello"), said, user("Why?", star), response_format=json_schema({"a": {"type": "string"}})),
    )
    assert (service.asks[-1].prompt, len(service.asks[-1].pictures)) == ("Why?", 2), "of a question asked in parts"
    most = service.info.context // 10
    came = api.post(CHAT, json=chat(user(*[image()] * (most + 1), "?")))
    assert error(came) == (400, "context_length_exceeded", "messages")
