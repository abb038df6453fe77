"""The application: routes, guards and errors put together around one service. Starts no server and no engine."""

from dataclasses import dataclass, field
from importlib.metadata import version

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from llama_adapter.app.http_api.access import OWN_PATHS, AccessLog
from llama_adapter.app.http_api.chat import complete_chat
from llama_adapter.app.http_api.documentation import (
    CHAT_BODY,
    CHAT_REPLY,
    DESCRIPTION,
    SUMMARY,
    TITLE,
    document,
    errors,
)
from llama_adapter.app.http_api.guards import GuardSettings, add_guards
from llama_adapter.app.http_api.metrics import Metrics
from llama_adapter.app.http_api.operations import operations
from llama_adapter.app.http_api.pictures import PictureSettings
from llama_adapter.app.http_api.problems import ApiError, of_status
from llama_adapter.app.http_api.replies import ChatCompletion
from llama_adapter.app.online.service import Service
from llama_adapter.app.online.types import ServiceLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiSettings:
    """What a server of the API is started with; the defaults are for a loopback address."""

    pictures: PictureSettings = field(
        default_factory=lambda: PictureSettings(max_picture_bytes=ServiceLimits().max_picture_bytes)
    )
    guards: GuardSettings = field(default_factory=GuardSettings)


def create_api(service: Service, *, settings: ApiSettings, metrics: Metrics | None = None) -> FastAPI:
    """The API of a service. `metrics` is what the service was given as its observer; without, its times are missing."""
    metrics = metrics or Metrics()
    metrics.watch(service)
    app = FastAPIOffline(
        title=TITLE,
        summary=SUMMARY,
        description=DESCRIPTION,
        version=version("llama-adapter"),
        docs_url="/docs",
        redoc_url=None,
        redirect_slashes=False,
    )
    app.include_router(operations(service, metrics=metrics))

    @app.post(
        "/v1/chat/completions",
        tags=["chat"],
        response_model=ChatCompletion,
        responses={200: CHAT_REPLY, **errors(400, 401, 404, 408, 413, 415, 429, 500, 503, 504)},
        openapi_extra={"requestBody": CHAT_BODY},
    )
    async def create_chat_completion(request: Request) -> Response:
        """Answer a question about a picture."""
        return await complete_chat(request, service=service, pictures=settings.pictures)

    _keep_own_paths(app)
    document(app, needs_key=bool(settings.guards.api_keys))
    _tell_errors(app)
    add_guards(app, settings=settings.guards)
    app.add_middleware(AccessLog, metrics=metrics)  # the last one added is the outermost
    return app


def _keep_own_paths(app: FastAPI) -> None:
    """Refuse what else is asked of the API's paths: a page at the root would get it, and let other sites ask."""
    for path, methods in {**OWN_PATHS, "/v1/models/{model:path}": "GET"}.items():
        app.router.routes.append(Route(path, _Refusal(405, headers={"allow": methods})))
    app.router.routes.append(Route("/v1/{path:path}", _Refusal(404)))


class _Refusal:
    """An application that refuses every request, whatever its method."""

    def __init__(self, status: int, *, headers: dict[str, str] | None = None) -> None:
        self._status, self._headers = status, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise HTTPException(self._status, headers=self._headers)


def _tell_errors(app: FastAPI) -> None:
    """Give every error one form, whoever raises it."""

    @app.exception_handler(ApiError)
    async def tell_error(request: Request, error: ApiError) -> Response:
        return _reply(error)

    @app.exception_handler(HTTPException)
    async def tell_status(request: Request, error: HTTPException) -> Response:
        problem = of_status(error.status_code)
        problem.headers.update(error.headers or {})
        return _reply(problem)

    @app.exception_handler(RequestValidationError)
    async def tell_invalid(request: Request, error: RequestValidationError) -> Response:
        return _reply(of_status(400))


def _reply(error: ApiError) -> Response:
    return Response(error.body(), status_code=error.http_status, headers=error.headers, media_type="application/json")
