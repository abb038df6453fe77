"""The application: routes, their documentation, guards and error handlers around one service. Starts no server."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from copy import copy
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Body, FastAPI, Request, Response, Security
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from starlette.routing import Route

from llama_adapter import __version__
from llama_adapter.app.captioning.captioner import ModelInfo
from llama_adapter.app.serving.http_api.access import AccessLog, RootPath, visit_of
from llama_adapter.app.serving.http_api.asking import Asker, Form, Reply, model_info, shown_name
from llama_adapter.app.serving.http_api.batches import Batches
from llama_adapter.app.serving.http_api.bodies import parse_json
from llama_adapter.app.serving.http_api.chat import ChatReply
from llama_adapter.app.serving.http_api.completions import CompletionReply
from llama_adapter.app.serving.http_api.errors import add_error_handlers, not_stored, of_status
from llama_adapter.app.serving.http_api.file_routes import FILES_PATH, add_file_routes, files_are_off
from llama_adapter.app.serving.http_api.file_store import FileLimits
from llama_adapter.app.serving.http_api.guards import API_PREFIX, GuardSettings, add_guards
from llama_adapter.app.serving.http_api.metrics import CONTENT_TYPE, Metrics
from llama_adapter.app.serving.http_api.pictures import PictureSettings
from llama_adapter.app.serving.http_api.replying import IGNORED_TURNS, AnswerResponse
from llama_adapter.app.serving.http_api.responses import ResponsesReply
from llama_adapter.app.serving.http_api.schemas import (
    LARGEST_SEED,
    Architecture,
    Health,
    Model,
    ModelList,
    Readiness,
    content_of,
    documentation,
    error_replies,
    with_all_fields,
)
from llama_adapter.app.serving.online.base import OnlineService
from llama_adapter.app.serving.online.types import ServiceLimits

_METRICS_REPLY = {"description": "Prometheus text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
_INLINE_BYTES = 64 * 2**10  # a body up to this size is parsed in the event loop: starting a thread takes as long


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
        description=documentation()["description"],
        version=__version__,
        docs_url="/docs",
        redoc_url=None,
        redirect_slashes=False,
    )
    needs_key = bool(settings.guards.api_keys)
    app.router.routes += _openai_routes(service, settings=settings, needs_key=needs_key, batches=batches).routes
    app.router.routes += _operation_routes(service, metrics=metrics).routes
    _answer_head(app)
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
        forms=forms(),
        limits=limits,
        max_row_bytes=settings.guards.max_body_bytes,
        rows_at_once=2 * service.batch_size,  # one half is read while the other half is answered
    )


def _asker(service: OnlineService, *, settings: ApiSettings) -> Asker:
    return Asker(service=service, pictures=settings.pictures, model_names=settings.model_names)


def forms() -> dict[str, Form[Any]]:
    """Path -> form of the requests for answers. Chat and responses have the fields of all tasks."""
    replies: tuple[type[Reply[Any]], ...] = (ChatReply, ResponsesReply, CompletionReply)
    return {reply.path: Form(with_all_fields(reply.base_request), reply) for reply in replies}


def _openai_routes(
    service: OnlineService, *, settings: ApiSettings, needs_key: bool, batches: Batches | None
) -> APIRouter:
    # Documents the key; `guards.AccessGuard` checks it before the body is read.
    keys = [Security(HTTPBearer(scheme_name="key", auto_error=False))] if needs_key else []
    router = APIRouter(prefix="/v1", dependencies=keys, route_class=_JsonRoute)
    created, names = int(time.time()), settings.model_names
    for path, form in forms().items():
        _add_form(router, path, form, asker=_asker(service, settings=settings))

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
    seen = Architecture(input_modalities=["text", "image"] if info.sees_pictures else ["text"])
    return Model(id=name, created=created, max_model_len=info.context, architecture=seen)


def _add_form(router: APIRouter, path: str, form: Form[Any], *, asker: Asker) -> None:
    about = documentation()["forms"][path]
    one_event = {
        "type": "object",
        "description": f"One event: {about['events']}.",
        "properties": {"data": {"type": "string"}},
        "required": ["data"],
    }
    answer = {
        "description": "The answer; server-sent events if `stream` is true.",
        "content": {**content_of(about["answer"]), "text/event-stream": {"schema": one_event}},
        "headers": {IGNORED_TURNS: {"description": "Messages not seen in full.", "schema": {"type": "integer"}}},
    }

    @router.post(
        path.removeprefix("/v1"),
        name=about["name"],
        tags=[about["tag"]],
        description=about["description"],
        responses={200: answer, **error_replies(400, 401, 404, 408, 413, 415, 429, 500, 503, 504)},
    )
    async def create(
        wanted: Annotated[form.request, Body(openapi_examples=about["examples"])],  # type: ignore[name-defined]
        request: Request,
    ) -> AnswerResponse:
        client = str(request.scope.get("state", {}).get("client", ""))
        visit = visit_of(request.scope)
        pending = await asker.ask(wanted, form=form, request_id=visit.id, client=client)
        visit.model = pending.model
        return AnswerResponse(pending, is_stream=bool(wanted.stream))


def _operation_routes(service: OnlineService, *, metrics: Metrics) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/health", responses={503: {"model": Health, "description": "Not working."}})
    async def health(response: Response) -> Health:
        """Whether the engine works: 503 while it is loading, stalled, failed or closed."""
        status = service.status()
        is_working = status.state in ("ready", "draining") and not status.is_stalled
        response.status_code = 200 if is_working else 503
        return Health.model_validate(status)

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


def _answer_head(app: FastAPI) -> None:
    """Answer HEAD where GET is answered. The documentation does not mention it."""
    for route in [one for one in app.router.routes if isinstance(one, APIRoute) and "GET" in (one.methods or ())]:
        head = copy(route)
        head.methods, head.include_in_schema = {"HEAD"}, False
        app.router.routes.append(head)


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
    """FastAPI's OpenAPI schema with the answers of `openapi.yaml`, without status 422 and its schemas.

    This API answers 400 to invalid bodies.
    """
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, summary=app.summary, description=app.description, routes=app.routes
        )
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        schemas = schema["components"]["schemas"] | documentation()["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for name in ("ChatRequest", "ResponsesRequest", "CompletionRequest"):
            seed = schemas[name]["properties"]["seed"]
            seed["anyOf"][0] |= {"minimum": -LARGEST_SEED - 1, "maximum": LARGEST_SEED}  # FastAPI writes floats
            # Without the `tool_choice` none, tools are empty or null.
            schemas[name]["if"] = {"properties": {"tool_choice": {"not": {"const": "none"}}}}
            schemas[name]["then"] = {"properties": {"tools": {"maxItems": 0}}}
        schema["components"]["schemas"] = schemas
        app.openapi_schema = schema
    return app.openapi_schema
