"""The application: routes, their documentation, guards and error handlers around one service. Starts no server."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, FastAPI, Request, Response, Security
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from starlette.routing import Route
from starlette.types import Scope

from llama_adapter import __version__
from llama_adapter.app.captioning.captioner import ModelInfo
from llama_adapter.app.serving.http_api.access import AccessLog, RootPath, visit_of
from llama_adapter.app.serving.http_api.asking import Asker, Form, model_info, shown_name
from llama_adapter.app.serving.http_api.batches import Batches
from llama_adapter.app.serving.http_api.bodies import parse_json
from llama_adapter.app.serving.http_api.chat import chat_form
from llama_adapter.app.serving.http_api.completions import completions_form
from llama_adapter.app.serving.http_api.errors import add_error_handlers, not_stored, of_status
from llama_adapter.app.serving.http_api.file_routes import FILES_PATH, add_file_routes, files_are_off
from llama_adapter.app.serving.http_api.file_store import FileLimits
from llama_adapter.app.serving.http_api.guards import API_PREFIX, GuardSettings, add_guards
from llama_adapter.app.serving.http_api.metrics import CONTENT_TYPE, Metrics
from llama_adapter.app.serving.http_api.pictures import PictureSettings
from llama_adapter.app.serving.http_api.replying import IGNORED_TURNS, AnswerResponse
from llama_adapter.app.serving.http_api.response_schemas import ResponseBody
from llama_adapter.app.serving.http_api.responses import responses_form
from llama_adapter.app.serving.http_api.schemas import (
    COMPLETIONS_EXAMPLE,
    EXAMPLE,
    LARGEST_SEED,
    RESPONSES_EXAMPLE,
    Architecture,
    ChatCompletion,
    CommonRequest,
    Completion,
    CompletionRequest,
    Health,
    Model,
    ModelList,
    Readiness,
    error_replies,
)
from llama_adapter.app.serving.online.protocol import OnlineService
from llama_adapter.app.serving.online.types import ServiceLimits

DESCRIPTION = f"""
Point an OpenAI client at `/v1` of this server and ask about one picture per request. `/v1/chat/completions` and
`/v1/responses` answer alike. `/v1/completions` continues texts without the model's template.

**Messages.** The model was trained on single questions about single pictures.

- The *picture* is the last one of the newest message that has one; with several pictures, `picture_used` names it in
  the answer. Send it as a data URI (`data:image/png;base64,...`). URLs are fetched only from hosts that the server was
  started with.
- *Without a picture*, the model answers from the text alone. It then sees an empty picture, as in training on texts.
- The *last message* must have the role user. Its text is the instruction.
- Without any text, the model writes a caption.
- *System* and *developer* messages, `instructions` and *earlier turns* are accepted. Only a model for chat sees them;
  the header `{IGNORED_TURNS}` counts those that the model does not see in full.

**Out-of-distribution pictures.** If the model can tell, the choice has `unfamiliar`: true for a picture unlike those of
the training set, so the answer may be meaningless. A stream sends it with `finish_reason`, like the probabilities.

**Files and batches.** With `--batch-folder`, `/v1/files` takes JSONL files of requests, and `/v1/batches` answers them
while other requests are answered.

**Defaults**: greedy decoding (`temperature` 0), `top_p` 0.75, at most 64 tokens.

**Errors** have OpenAI's form. 429 and 503 have a `Retry-After` header. Every answer has an `x-request-id`, which the
server's log repeats. The log holds no text and no picture.
"""

CHAT_PATH, RESPONSES_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/responses", "/v1/completions"
_METRICS_REPLY = {"description": "Prometheus text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
_INLINE_BYTES = 64 * 2**10  # a body up to this size is parsed in the event loop: starting a thread takes as long


def _answer_reply(events: str) -> dict[str, Any]:
    one_event = {
        "type": "object",
        "description": f"One event: {events}.",
        "properties": {"data": {"type": "string"}},
        "required": ["data"],
    }
    return {
        "description": "The answer; server-sent events if `stream` is true.",
        "content": {"text/event-stream": {"schema": one_event}},
        "headers": {IGNORED_TURNS: {"description": "Messages not seen in full.", "schema": {"type": "integer"}}},
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiSettings:
    """Settings of the API. The defaults suit a server on a loopback address."""

    model_names: tuple[str, ...] = ()  # the model's names; answers show the first one. Empty: the name in its files
    pictures: PictureSettings = field(
        default_factory=lambda: PictureSettings(max_picture_bytes=ServiceLimits().max_picture_bytes)
    )
    guards: GuardSettings = field(default_factory=GuardSettings)


def create_api(
    service: OnlineService, *, settings: ApiSettings, metrics: Metrics | None = None, batches: Batches | None = None
) -> FastAPI:
    """The API of a service. Pass the service's observer as `metrics`; otherwise /metrics has no times.

    Without `batches`, requests for files and batches are answered with 404 and a hint.
    """
    metrics = metrics or Metrics()
    metrics.watch(service)
    app = FastAPIOffline(
        title="LLaMA-Adapter",
        summary="Questions about pictures, through OpenAI's chat API.",
        description=DESCRIPTION,
        version=__version__,
        docs_url="/docs",
        redoc_url=None,
        redirect_slashes=False,
    )
    needs_key = bool(settings.guards.api_keys)
    app.router.routes += _openai_routes(service, settings=settings, needs_key=needs_key, batches=batches).routes
    app.router.routes += _operation_routes(service, metrics=metrics).routes
    own_paths = _refuse_other_methods(app, has_files=batches is not None)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    add_error_handlers(app)
    add_guards(app, settings=settings.guards, unread=() if batches is None else (FILES_PATH,))
    app.add_middleware(AccessLog, metrics=metrics, paths=own_paths)
    if settings.guards.root_path:
        app.add_middleware(RootPath, root_path=settings.guards.root_path)  # added last: the outermost
    return app


def open_batches(folder: str, service: OnlineService, *, settings: ApiSettings, limits: FileLimits) -> Batches:
    """The batches of a folder, answered by a service whose model is loaded. Raises what `Batches` raises."""
    return Batches(
        folder,
        asker=_asker(service, settings=settings),
        forms={CHAT_PATH: chat_form(), RESPONSES_PATH: responses_form(), COMPLETIONS_PATH: completions_form()},
        limits=limits,
        max_row_bytes=settings.guards.max_body_bytes,
        rows_at_once=2 * service.batch_size,  # one half is read while the other half is answered
    )


def _asker(service: OnlineService, *, settings: ApiSettings) -> Asker:
    return Asker(service=service, pictures=settings.pictures, model_names=settings.model_names)


def _openai_routes(
    service: OnlineService, *, settings: ApiSettings, needs_key: bool, batches: Batches | None
) -> APIRouter:
    # Documents the key; `guards.AccessGuard` checks it before the body is read.
    keys = [Security(HTTPBearer(scheme_name="key", auto_error=False))] if needs_key else []
    router = APIRouter(prefix="/v1", dependencies=keys, route_class=_JsonRoute)
    created, names = int(time.time()), settings.model_names
    chat, responses, completions = chat_form(), responses_form(), completions_form()
    asker = _asker(service, settings=settings)
    statuses = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)
    chat_events = _answer_reply("a `chat.completion.chunk`, an error, or `[DONE]`")
    completion_events = _answer_reply("a `text_completion`, an error, or `[DONE]`")
    response_events = _answer_reply("a `response.*` event of OpenAI's, or `error`")

    @router.post(
        CHAT_PATH.removeprefix("/v1"),
        tags=["chat"],
        response_model=ChatCompletion,
        responses={200: chat_events, **error_replies(*statuses)},
    )
    async def create_chat_completion(
        wanted: Annotated[chat.request, Body(openapi_examples={"red square": {"value": EXAMPLE}})],  # type: ignore[name-defined]
        request: Request,
    ) -> Response:
        """Answer a question about a picture."""
        return await _answer(wanted, form=chat, asker=asker, scope=request.scope)

    @router.post(
        RESPONSES_PATH.removeprefix("/v1"),
        tags=["responses"],
        response_model=ResponseBody,
        responses={200: response_events, **error_replies(*statuses)},
    )
    async def create_response(
        wanted: Annotated[
            responses.request,  # type: ignore[name-defined]
            Body(openapi_examples={"red square": {"value": RESPONSES_EXAMPLE}}),
        ],
        request: Request,
    ) -> Response:
        """Answer a question about a picture. Nothing is stored."""
        return await _answer(wanted, form=responses, asker=asker, scope=request.scope)

    @router.post(
        COMPLETIONS_PATH.removeprefix("/v1"),
        tags=["completions"],
        response_model=Completion,
        responses={200: completion_events, **error_replies(*statuses)},
    )
    async def create_completion(
        wanted: Annotated[CompletionRequest, Body(openapi_examples={"text": {"value": COMPLETIONS_EXAMPLE}})],
        request: Request,
    ) -> Response:
        """Continue texts without a template."""
        return await _answer(wanted, form=completions, asker=asker, scope=request.scope)

    if batches is not None:
        add_file_routes(router, batches)

    @router.get("/models", tags=["models"], responses=error_replies(401, 503))
    async def list_models() -> ModelList:
        """The names of the loaded model."""
        info = model_info(service)
        return ModelList(data=[_model(name, info, created=created) for name in names or (info.name,)])

    # A path, because model names may have slashes.
    @router.get("/models/{model:path}", tags=["models"], responses=error_replies(401, 404, 503))
    async def retrieve_model(model: str) -> Model:
        """The loaded model, by one of its names or as `default`."""
        info = model_info(service)
        return _model(shown_name(model, info=info, names=names), info, created=created)

    return router


def _model(name: str, info: ModelInfo, *, created: int) -> Model:
    inputs: list[Literal["text", "image"]] = ["text", "image"] if info.has_adapter else ["text"]
    return Model(id=name, created=created, architecture=Architecture(input_modalities=inputs))


async def _answer(request: CommonRequest, *, form: Form[Any], asker: Asker, scope: Scope) -> AnswerResponse:
    client = str(scope.get("state", {}).get("client", ""))
    visit = visit_of(scope)
    pending = await asker.ask(request, form=form, request_id=visit.id, client=client)
    visit.model = pending.model
    return AnswerResponse(pending, is_stream=bool(request.stream))


def _operation_routes(service: OnlineService, *, metrics: Metrics) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/health", responses={503: {"model": Health, "description": "Not working."}})
    async def health(response: Response) -> Health:
        """Whether the engine works: 503 while it is loading, stalled, failed or closed."""
        status = service.status()
        is_working = status.state in ("ready", "draining") and not status.is_stalled
        response.status_code = 200 if is_working else 503
        return Health(
            status=status.state,
            is_stalled=status.is_stalled,
            restarts=status.restarts,
            last_error=status.last_error,
            running=status.num_running,
            waiting=status.num_waiting,
            reading=status.num_reading,
            slow_reading=status.num_slow_reading,
            uptime_s=round(status.uptime_s, 3),
        )

    @router.get("/ready", responses={503: {"model": Readiness, "description": "Not ready."}})
    async def ready(response: Response) -> Readiness:
        """Whether requests are accepted: 503 while the model is loading, the engine stalled or the service draining."""
        status = service.status()
        is_ready = status.state == "ready" and not status.is_stalled
        response.status_code = 200 if is_ready else 503
        return Readiness(ready=is_ready, status=status.state)

    @router.get("/metrics", response_class=PlainTextResponse, responses={200: _METRICS_REPLY})
    def read_metrics() -> Response:
        """Counts and times for Prometheus."""
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    return router


class _JsonRoute(APIRoute):
    """Reads bodies with `_JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json


class _JsonRequest(Request):
    """Parses strict JSON: UTF-8, valid Unicode, finite numbers. A large body is parsed in a thread."""

    async def json(self) -> Any:
        """The body; raises json.JSONDecodeError, which FastAPI turns into a validation error."""
        body = await self.body()
        return parse_json(body) if len(body) <= _INLINE_BYTES else await asyncio.to_thread(parse_json, body)


def _refuse_other_methods(app: FastAPI, *, has_files: bool) -> frozenset[str]:
    """Add routes that answer 405 at the API's paths and 404 below them; returns the API's paths without parameters.

    A page mounted at the root would otherwise get these requests, and its CORS headers allow other sites to send them.
    """
    methods: dict[str, set[str]] = {}
    for route in app.router.routes:
        if isinstance(route, Route | APIRoute) and route.methods:
            methods.setdefault(route.path, set()).update(route.methods)
    for path, known in methods.items():
        refusal = of_status(405, headers={"allow": ", ".join(sorted(known))})
        app.router.routes.append(Route(path, refusal.response()))
        if path.startswith(API_PREFIX):  # clients whose base URL lacks /v1 request this path
            app.router.routes.append(Route(path.removeprefix(API_PREFIX.rstrip("/")), of_status(404).response()))
    app.router.routes.append(Route("/v1/responses/{id:path}", not_stored().response()))
    if not has_files:
        for path in ("/v1/files", "/v1/batches"):
            app.router.routes += [Route(one, files_are_off().response()) for one in (path, f"{path}/{{id:path}}")]
    app.router.routes.append(Route("/v1/{path:path}", of_status(404).response()))
    return frozenset(path for path in methods if "{" not in path)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's OpenAPI schema without status 422 and its schemas: this API answers 400 to invalid bodies."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, summary=app.summary, description=app.description, routes=app.routes
        )
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(name, None)
        for name in ("ChatRequest", "ResponsesRequest", "CompletionRequest"):
            seed = schema["components"]["schemas"][name]["properties"]["seed"]
            seed["anyOf"][0] |= {"minimum": -LARGEST_SEED - 1, "maximum": LARGEST_SEED}  # FastAPI writes floats
        app.openapi_schema = schema
    return app.openapi_schema
