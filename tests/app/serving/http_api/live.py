"""An application behind a real socket, and a service that gives the answers set by a test."""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import httpx
import jsonschema
import uvicorn
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.serving.http_api.api import ApiSettings, create_api
from llama_adapter.app.serving.http_api.running import address_of, bind
from llama_adapter.app.serving.http_api.schemas import documentation
from llama_adapter.app.serving.online.request_handle import Ask, RequestHandle
from llama_adapter.app.serving.online.types import ServiceLimits, ServiceStatus
from tests.app import toys

INFO = dataclasses.replace(
    toys.INFO, name="stub", digest="0123456789abcdef", operators="auto", context=512, default_prompt="Describe it."
)


@contextmanager
def served(application: ASGIApp, **options: Any) -> Iterator[str]:
    """Serve on a free port of loopback; yields the base URL. `options` are further ones of uvicorn."""
    with closing(bind("127.0.0.1", 0)) as listener:
        listener.listen(128)
        own: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off", "proxy_headers": False}
        server = uvicorn.Server(uvicorn.Config(application, **own, **options))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="uvicorn", daemon=True)
        thread.start()
        try:
            yield address_of(listener)
        finally:
            server.should_exit = True
            thread.join(30)
            state = server.server_state
            assert not thread.is_alive(), f"the server does not end; it has {state.connections} and {state.tasks}"


def answer(text: str = "red", *, error: AnswerError | None = None, **fields: object) -> Answer:
    """An answer with one token per word."""
    values: dict[str, Any] = {
        **{"index": 0, "picture": "picture", "digest": "d", "prompt": "p", "text": text, "error": error},
        **{"token_ids": tuple(range(len(text.split()))), "finish": "error" if error else "stop", "prompt_tokens": 5},
    }
    return Answer(**{**values, **fields})


def failed(code: str, text: str = "") -> Answer:
    return answer(text, error=AnswerError(code=code, message="Told."))


def raising(error: Exception) -> Callable[[RequestHandle], None]:
    """An `on_submit` that refuses every request."""

    def refuse(handle: RequestHandle) -> None:
        raise error

    return refuse


def status(state: str = "ready", **fields: object) -> ServiceStatus:
    counts = dict.fromkeys((field.name for field in dataclasses.fields(ServiceStatus)), 0)
    return ServiceStatus(
        **{**counts, "state": state, "is_stalled": False, "last_error": None, "uptime_s": 1.0, **fields}
    )


class StubService:
    """What the API and the page use of a service. `on_submit` gets each handle and may raise, deliver, or keep it."""

    limits, spec, batch_size = ServiceLimits(), CaptionerSpec(), 2

    def __init__(self, on_submit: Callable[[RequestHandle], None] = lambda handle: handle.deliver(answer())) -> None:
        self.on_submit = on_submit
        self.info = INFO
        self.asks: list[Ask] = []
        self.cancelled = threading.Event()
        self.state = status()

    def submit(self, ask: Ask) -> RequestHandle:
        handle = RequestHandle(len(self.asks), cancel=self._cancel)
        self.on_submit(handle)
        self.asks.append(ask)
        return handle

    def _cancel(self, handle: RequestHandle) -> None:
        handle.deliver(failed("cancelled"))
        self.cancelled.set()

    def status(self) -> ServiceStatus:
        return self.state


def check_documented(body: Any, schema: str) -> None:
    documented = {"$ref": f"#/components/schemas/{schema}", "components": documentation()}
    jsonschema.Draft202012Validator(documented).validate(body)


def error(response: httpx.Response) -> tuple[int, str, str | None]:
    """Status, code and parameter of an error in OpenAI's form."""
    assert response.headers["content-type"] == "application/json"
    (told,) = response.json().values()
    assert set(told) == {"message", "type", "param", "code"}
    assert told["message"]
    return response.status_code, told["code"], told["param"]


def api_of(service: Any, **settings: Any) -> TestClient:
    return TestClient(create_api(service, settings=ApiSettings(**settings)), base_url="http://localhost")


@contextmanager
def client_of(service: StubService, **settings: Any) -> Iterator[httpx.Client]:
    """A client of this service's API, over a socket."""
    with (
        served(create_api(service, settings=ApiSettings(**settings))) as url,  # type: ignore[arg-type]
        httpx.Client(base_url=url, trust_env=False, timeout=30.0, verify=False) as client,  # reads no certificates
    ):
        yield client
