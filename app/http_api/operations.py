"""The paths beside the chat: which models there are, how the service is, and what it counted."""

import time

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from llama_adapter.app.http_api.chat import check_model, model_info
from llama_adapter.app.http_api.documentation import PLAIN_TEXT, errors
from llama_adapter.app.http_api.metrics import CONTENT_TYPE, Metrics
from llama_adapter.app.http_api.replies import Health, Model, ModelList, Readiness
from llama_adapter.app.online.service import Service


def operations(service: Service, *, metrics: Metrics) -> APIRouter:
    """Routes of one service."""
    router = APIRouter()
    created = int(time.time())

    @router.get("/v1/models", tags=["models"], responses=errors(401, 503))
    async def list_models() -> ModelList:
        """The loaded model."""
        return ModelList(data=[Model(id=model_info(service).name, created=created)])

    # A path, since names of models may have slashes.
    @router.get("/v1/models/{model:path}", tags=["models"], responses=errors(401, 404, 503))
    async def retrieve_model(model: str) -> Model:
        """The loaded model, by its name or as `default`."""
        info = model_info(service)
        check_model(model, info=info)
        return Model(id=info.name, created=created)

    @router.get("/health", tags=["operations"], responses={503: {"model": Health, "description": "Not working"}})
    async def health(response: Response) -> Health:
        """Whether the engine works: 503 while it loads, is stalled, has failed or is closed."""
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

    @router.get("/ready", tags=["operations"], responses={503: {"model": Readiness, "description": "Not ready"}})
    async def ready(response: Response) -> Readiness:
        """Whether requests are taken and answered: 503 while the model loads, is stalled, or the service ends."""
        status = service.status()
        is_ready = status.state == "ready" and not status.is_stalled
        response.status_code = 200 if is_ready else 503
        return Readiness(ready=is_ready, status=status.state)

    @router.get("/metrics", tags=["operations"], response_class=PlainTextResponse, responses=PLAIN_TEXT)
    def read_metrics() -> Response:
        """Counts and times, as Prometheus reads them."""
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    return router
