"""The API over a real socket, with a service that gives the answers set by the test."""

import asyncio
import dataclasses
import gc
import http.client
import json
import logging
import re
import threading
import tracemalloc
from typing import Any

import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from starlette.responses import PlainTextResponse
from starlette.types import Message

from llama_adapter.app.captioning.tasks.answers import TextDelta
from llama_adapter.app.serving.http_api.api import ApiSettings, create_api
from llama_adapter.app.serving.http_api.guards import GuardSettings
from llama_adapter.app.serving.http_api.metrics import Metrics
from llama_adapter.app.serving.online.request_handle import RequestHandle
from llama_adapter.app.serving.online.types import BusyError
from llama_adapter.runtime.terminal.logs import FIELDS
from tests.app.serving.http_api.asgi import Client
from tests.app.serving.http_api.live import (
    StubService,
    answer,
    client_of,
    error,
    failed,
    raising,
    served,
    status,
)
from tests.app.serving.http_api.requests import CHAT, chat, data_uri, image, json_schema, user

pytestmark = pytest.mark.slow

SECRET = "Xyzzy-secret"


def test_a_request_that_has_not_arrived_when_the_server_ends_is_refused() -> None:
    sent: list[Message] = []

    async def end() -> None:
        begun = asyncio.Event()

        async def receive() -> Message:
            begun.set()
            return await asyncio.Future()

        async def send(message: Message) -> None:
            sent.append(message)

        api = create_api(StubService(), settings=ApiSettings())  # type: ignore[arg-type]
        task = asyncio.create_task(api(Client().scope, receive, send))
        await begun.wait()
        task.cancel()
        await task

    asyncio.run(end())
    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["error"]["code"] == "cancelled"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_client_that_hangs_up_cancels_its_request(
    client: httpx.Client, service: StubService, is_stream: bool, has_begun: bool
) -> None:
    submitted = threading.Event()

    def begin(handle: RequestHandle) -> None:
        if has_begun:
            handle.deliver(TextDelta(index=0, text="a "))
        submitted.set()

    service.on_submit = begin
    connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port, timeout=30)
    connection.request("POST", CHAT, json.dumps(chat(stream=is_stream)), {"Content-Type": "application/json"})
    assert submitted.wait(30)
    if is_stream and has_begun:
        assert connection.getresponse().readline().startswith(b"data: ")

    connection.close()

    assert service.cancelled.wait(30)


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_body_of_a_request_is_released_before_its_answer(
    client: httpx.Client, service: StubService, is_stream: bool
) -> None:
    held: list[int] = []

    def measure(handle: RequestHandle) -> None:
        def measure_and_answer() -> None:
            held.append(tracemalloc.get_traced_memory()[0])
            handle.deliver(answer())

        threading.Timer(0.3, measure_and_answer).start()

    service.on_submit = measure
    body = json.dumps(chat(user(image(data_uri(bytes(6_000_000)))), stream=is_stream)).encode()
    tracemalloc.start()
    try:
        response = client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    finally:
        tracemalloc.stop()

    assert response.status_code == 200
    assert held[0] < 8_000_000  # the picture, without the 8 MB of base64 that encoded it


def logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """The access log of the last server. One of an earlier test may still have logged lines from its own thread."""
    records = [record for record in caplog.records if record.name == "llama_adapter.access"]
    return [record for record in records if record.thread == records[-1].thread]


def test_what_the_page_loads_and_polls_is_logged_for_debugging(
    service: StubService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="llama_adapter")
    api = create_api(service, settings=ApiSettings())  # type: ignore[arg-type]
    api.mount("/", PlainTextResponse("page"))
    with served(api) as url:
        for method, path in (("GET", "/"), ("POST", "/gradio_api/run/predict"), ("GET", "/health")):
            httpx.request(method, f"{url}{path}", trust_env=False)
    assert [record.levelname for record in logged(caplog)] == ["DEBUG", "DEBUG", "INFO"]


def test_log_and_metrics_have_each_request_by_its_route_and_nothing_of_what_was_asked(
    service: StubService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="llama_adapter")
    service.on_submit = lambda handle: handle.deliver(answer(SECRET))

    with client_of(service) as client:  # when this ends, the server has ended and written all its log lines
        service.state = status(num_running=3, restarts=2, num_put_back=7)
        came = [
            client.post(f"{CHAT}?key={SECRET}", json=chat(user(image(), SECRET))),
            client.post(CHAT, json=chat(user(image(f"data:{SECRET}"), SECRET), **{SECRET: SECRET})),
            client.get(f"/nowhere?key={SECRET}", headers={"x-forwarded-for": "192.0.2.1"}),
            client.get(f"/v1/models/{SECRET}"),
            client.request(SECRET.upper(), "/health"),
            client.get("/metrics"),
        ]

    records = logged(caplog)
    lines = [record.getMessage() for record in records]
    assert [re.sub(r" \d+ ms.*", "", line) for line in lines] == [
        f"POST {CHAT} 200",
        f"POST {CHAT} 400",
        "GET other 404",
        "GET /v1/models/{model:path} 404",
        "other /health 405",
        "GET /metrics 200",
    ]
    assert "5+1 tokens" in lines[0]
    assert ", model stub" in lines[0]
    assert lines[2].endswith(", error not_found, path /nowhere")
    fields = [getattr(record, FIELDS) for record in records]
    assert [one.get("error") for one in fields] == [
        *(None, "unknown_parameter", "not_found", "model_not_found", "method_not_allowed", None)
    ]
    assert {one["client"] for one in fields} == {"127.0.0.1"}
    assert [one.get("forwarded_for") for one in fields] == [None, None, "192.0.2.1", None, None, None]
    assert [one["request_id"] for one in fields] == [response.headers["x-request-id"] for response in came]
    assert len({one["request_id"] for one in fields}) == len(came)
    assert service.asks[0].client == "address:127.0.0.1"
    assert SECRET.lower() not in "".join(record.getMessage() for record in caplog.records).lower()
    metrics = came[-1].text
    for line in (
        f'llama_adapter_http_requests_total{{method="POST",route="{CHAT}",status="200"}} 1.0',
        f'llama_adapter_http_requests_total{{method="POST",route="{CHAT}",status="400"}} 1.0',
        "llama_adapter_requests_running 3.0",
        "llama_adapter_restarts_total 2.0",
        "llama_adapter_rows_put_back_total 7.0",
    ):
        assert line in metrics
    assert SECRET.lower() not in metrics.lower()


def test_with_keys_only_the_api_asks_for_one_and_the_log_names_it(
    service: StubService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="llama_adapter")
    guards = GuardSettings(api_keys=("a-long-key", "another-key"), key_names=("alice", "bob"))
    with client_of(service, guards=guards) as client:
        schema = client.get("/openapi.json").json()
        taken = client.post(CHAT, json=chat(), headers={"Authorization": "Bearer another-key"})
        refused = client.post(CHAT, json=chat(), headers={"Authorization": "Bearer a-wrong-key"})

    assert schema["paths"][CHAT]["post"]["security"] == [{"key": []}]
    assert taken.status_code == 200
    assert service.asks[0].client.startswith("key:")
    assert error(refused)[:2] == (401, "invalid_api_key")
    fields = [getattr(record, FIELDS) for record in logged(caplog)[-2:]]
    assert [(one.get("key"), one.get("error")) for one in fields] == [("bob", None), (None, "invalid_api_key")]


def test_an_invalid_body_leaves_memory_without_the_garbage_collector(service: StubService) -> None:
    gc.collect()
    gc.disable()
    try:
        with client_of(service) as client:
            assert error(client.post(CHAT, content="{", headers={"content-type": "application/json"}))[0] == 400
        assert not any(type(one) is RequestValidationError for one in gc.get_objects())
    finally:
        gc.enable()


def test_internal_error_is_500_without_details(service: StubService, caplog: pytest.LogCaptureFixture) -> None:
    service.on_submit = raising(KeyError(SECRET))

    with client_of(service) as client:
        response = client.post(CHAT, json=chat(user(image(), SECRET)))

    assert error(response)[:2] == (500, "internal_error")
    assert SECRET not in response.text
    (told,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert told.startswith("KeyError in refuse (")
    assert response.headers["x-request-id"] in told
    assert SECRET not in caplog.text


def test_a_request_refused_in_part_leaves_no_other_part(client: httpx.Client, service: StubService) -> None:
    handles: list[RequestHandle] = []

    def refuse_third(handle: RequestHandle) -> None:
        if len(handles) == 2:
            raise BusyError("Full", retry_after_s=0.2)
        handles.append(handle)

    service.on_submit = refuse_third

    response = client.post(CHAT, json=chat(n=3))

    assert error(response)[:2] == (429, "busy")
    assert [handle.is_cancelled for handle in handles] == [True, True]


@pytest.mark.parametrize("is_stream", [False, True])
def test_json_of_a_schema_is_one_request_a_property(
    client: httpx.Client, service: StubService, is_stream: bool
) -> None:
    texts = iter(["yes", "a star"])
    service.on_submit = lambda handle: handle.deliver(answer(next(texts)))
    wanted = json_schema({"star": {"type": "boolean"}, "caption": {"type": "string", "description": "Describe it."}})

    response = client.post(CHAT, json=chat(response_format=wanted, stream=is_stream))

    made = '{"star": true, "caption": "a star"}'
    assert (
        json.dumps(made) in response.text if is_stream else response.json()["choices"][0]["message"]["content"] == made
    )
    assert [ask.prompt for ask in service.asks] == ["What color is it?", "Describe it."]


def test_a_page_at_the_root_gets_nothing_of_what_is_asked_of_the_api(service: StubService) -> None:
    headers = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
    application = create_api(service, settings=ApiSettings())  # type: ignore[arg-type]
    application.mount("/", PlainTextResponse("the page"))
    with served(application) as url, httpx.Client(base_url=url, trust_env=False) as client:
        assert client.get("/else").text == "the page"
        schema = client.get("/openapi.json").json()
        assert len(schema["paths"]) == 8
        for path in ("/v1/models", "/v1/models/default", "/health", "/ready", "/metrics"):
            told = client.head(path)
            assert (told.status_code, told.content) == (client.get(path).status_code, b"")
        for path in [*schema["paths"], "/docs", "/openapi.json"]:
            for method in ("OPTIONS", "DELETE"):
                reply = client.request(method, path.replace("{model}", "a/b"), headers=headers)
                assert error(reply)[:2] == (405, "method_not_allowed")
                assert not [name for name in reply.headers if name.startswith("access-control")]
                known = [name.upper() for name in schema["paths"].get(path, {"get": 1})]
                assert reply.headers["allow"].removesuffix(", HEAD") == ", ".join(known)
        for path in ("/v1/embeddings", "/v1//models", "/v1/"):
            assert error(client.get(path))[:2] == (404, "not_found")


@pytest.mark.parametrize(
    ("state", "is_healthy", "is_ready"),
    [
        (status("ready"), True, True),
        (status("ready", is_stalled=True), False, False),
        (status("draining"), True, False),
        (status("loading"), False, False),
        (status("restarting"), False, False),
        (status("failed"), False, False),
        (status("closed"), False, False),
    ],
)
def test_health_and_readiness_follow_the_state(
    client: httpx.Client, service: StubService, state: Any, is_healthy: bool, is_ready: bool
) -> None:
    counts = {"num_running": 3, "num_waiting": 4, "num_reading": 2, "num_slow_reading": 1, "restarts": 5}
    service.state = dataclasses.replace(state, last_error="It broke.", **counts)

    health, ready = client.get("/health"), client.get("/ready")

    assert (health.status_code == 200, ready.status_code == 200) == (is_healthy, is_ready)
    assert ready.json() == {"ready": is_ready, "status": state.state}
    assert health.json() == {
        **{"status": state.state, "is_stalled": state.is_stalled, "restarts": 5, "last_error": "It broke."},
        **{"running": 3, "waiting": 4, "reading": 2, "slow_reading": 1, "uptime_s": 1.0},
    }


def test_the_page_of_the_api_needs_nothing_from_elsewhere(client: httpx.Client) -> None:
    page = client.get("/docs").text

    sources = re.findall(r"""(?:src|href)=["']([^"']+)""", page)
    assert len(sources) == 3
    assert all(client.get(source).status_code == 200 for source in sources)
    assert "//" not in "".join(sources)


def test_the_schema_says_how_errors_look_and_none_of_the_framework_s_own(client: httpx.Client) -> None:
    schema = client.get("/openapi.json").json()

    responses = schema["paths"][CHAT]["post"]["responses"]
    assert {"200", "400", "401", "404", "413", "415", "429", "500", "503", "504"} <= responses.keys()
    for code, response in responses.items():
        if code != "200":
            assert response["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorReply")
    assert '"422"' not in json.dumps(schema)
    assert schema["components"]["schemas"]["Choice"]["properties"].keys() >= {"answer_probabilities", "unfamiliar"}
    assert "security" not in schema["paths"][CHAT]["post"]


def test_metrics_observe_what_the_service_tells() -> None:
    metrics = Metrics()

    metrics.first_token(0.1)
    metrics.stage("clip", 0.02)
    metrics.finished(answer("a red star"), 0.3)
    metrics.finished(answer("red", is_reused=True), 0.3)
    metrics.finished(answer("red", digest=""), 0.3)
    metrics.finished(failed("truncated"), 0.3)

    text = metrics.render().decode()
    for line in (
        "llama_adapter_time_to_first_token_seconds_count 1.0",
        'llama_adapter_stage_seconds_count{stage="clip"} 1.0',
        "llama_adapter_request_seconds_count 4.0",
        'llama_adapter_pictures_total{outcome="encoded"} 1.0',
        'llama_adapter_pictures_total{outcome="reused"} 1.0',
        'llama_adapter_pictures_total{outcome="none"} 1.0',
        'llama_adapter_pictures_total{outcome="truncated"} 1.0',
        'llama_adapter_tokens_total{kind="completion"} 5.0',
    ):
        assert line in text
