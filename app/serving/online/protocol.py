"""The interface between HTTP API and service: one model in this process, or replicas on many machines."""

from typing import Protocol

from llama_adapter.app.models.spec import ModelInfo
from llama_adapter.app.serving.online.request_handle import Ask, RequestHandle
from llama_adapter.app.serving.online.types import ServiceStatus


class OnlineService(Protocol):
    """Answers requests of many clients. Thread-safe; see `service.Service` for each method."""

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Raises UnavailableError while no model is loaded."""

    @property
    def batch_size(self) -> int:
        """Number of requests answered together. Raises UnavailableError while no model is loaded."""

    def submit(self, ask: Ask) -> RequestHandle:
        """Accept a request. Does not block. Raises the errors of `Service.submit`."""

    def status(self) -> ServiceStatus:
        """The current status."""

    def drain(self) -> None:
        """Accept no more requests; finish the accepted ones."""

    def wait_until_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until all requests are answered; returns whether that happened in time."""

    def close(self) -> None:
        """End the service; pending requests are answered with an error. Can be called again."""
