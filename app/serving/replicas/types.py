"""Settings and reports of replicas, and the protocol through which the service uses them. Imports no Ray."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from llama_adapter.app.captioning.tasks.answers import Event
from llama_adapter.app.models.spec import CaptionerSpec, ModelInfo
from llama_adapter.app.serving.online.request_handle import Ask
from llama_adapter.app.serving.online.types import ServiceLimits, ServiceStatus
from llama_adapter.runtime.given import require_least

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class ReplicaLostError(Exception):
    """A replica ended before its answer was complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryShare:
    """A replica's share of a machine's memory, if several replicas use it."""

    num_bytes: int
    num_replicas: int  # on that machine


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSettings:
    """The settings of one replica."""

    spec: CaptionerSpec
    limits: ServiceLimits
    folder: str  # the command's working directory, for relative paths
    threads: int | None  # compute threads on a CPU; None: torch's default
    memory: Mapping[str, MemoryShare]  # by Ray's id of the machine; on others a replica uses all free memory


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentSettings:
    """The number of replicas and how it scales, with Ray Serve's names. Raises ValueError for contradicting numbers."""

    name: str = "llama-adapter"  # name of the application
    replicas: int = 1  # at the start; also the minimum
    max_replicas: int | None = None  # None: the number of replicas is constant
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    graceful_shutdown_timeout_s: float = 60.0  # time for a replica to answer its requests before it is killed

    def __post_init__(self) -> None:
        require_least(self, "replicas")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas must be at least replicas ({self.replicas}), got {self.max_replicas}")

    @property
    def most(self) -> int:
        """The maximal number of replicas."""
        return self.replicas if self.max_replicas is None else self.max_replicas


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaReport:
    """The state of a replica."""

    name: str  # Ray Serve's name of the replica
    host: str
    pid: int
    spec: CaptionerSpec  # of the loaded model
    info: ModelInfo
    status: ServiceStatus


class Replicas(Protocol):
    """The replicas of one deployment. The methods run in one event loop."""

    @property
    def max_ongoing_requests(self) -> int:
        """The number of requests that one replica takes at once."""

    def ask(self, ask: Ask, *, session: str) -> AsyncIterator[Sequence[Event]]:
        """The events of a request, in groups; the last event is the answer.

        Requests with the same `session` go to the same replica, as long as it has room. An empty string is no session.
        Raises ReplicaLostError. Closing the iterator cancels the request.
        """

    async def reports(self) -> Sequence[ReplicaReport]:
        """The reports of the replicas that answer now."""

    async def metrics(self) -> Mapping[str, "Sequence[Metric]"]:
        """Name of a replica -> its metrics, for the replicas that answer now."""
