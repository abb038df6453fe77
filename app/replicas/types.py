"""What a replica is made of, what it tells, and what the service needs of all of them. Imports no Ray."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from llama_adapter.app.models.spec import CaptionerSpec, ModelInfo
from llama_adapter.app.online.request_handle import Ask
from llama_adapter.app.online.types import ServiceLimits, ServiceStatus
from llama_adapter.app.tasks.answers import Event

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class ReplicaLostError(Exception):
    """A replica ended before its answer was complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryShare:
    """A replica's part of the memory of a machine that several replicas share."""

    num_bytes: int
    num_replicas: int  # on that machine


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSettings:
    """The settings of one replica."""

    spec: CaptionerSpec
    limits: ServiceLimits
    folder: str  # the current folder of the command, for relative names
    threads: int | None  # that a CPU computes with; None: torch's default
    memory: Mapping[str, MemoryShare]  # by Ray's id of the machine; elsewhere a replica takes what is free


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentSettings:
    """How many replicas there are, in the words of Ray Serve. Raises ValueError for numbers that exclude each other."""

    name: str = "llama-adapter"  # of the application
    replicas: int = 1  # at the start, and the least
    max_replicas: int | None = None  # None: their number stays
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    graceful_shutdown_timeout_s: float = 60.0  # for a replica to answer what it has, before it is killed

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas must be at least 1, got {self.replicas}")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas must be at least replicas ({self.replicas}), got {self.max_replicas}")

    @property
    def most(self) -> int:
        """The most replicas at once."""
        return self.replicas if self.max_replicas is None else self.max_replicas


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaReport:
    """How a replica is."""

    name: str  # as Ray Serve names it
    host: str
    pid: int
    spec: CaptionerSpec  # of the loaded model
    info: ModelInfo
    status: ServiceStatus


class Replicas(Protocol):
    """The replicas of one deployment. Its methods run in one event loop."""

    @property
    def max_ongoing_requests(self) -> int:
        """Requests that one replica takes at once."""

    def ask(self, ask: Ask, *, session: str) -> AsyncIterator[Sequence[Event]]:
        """The events of a request, in groups; the last one is the answer.

        Requests of the same `session` go to the same replica, as long as it has room; an empty one is no session.
        Raises ReplicaLostError. Closing the iterator cancels the request.
        """

    async def reports(self) -> Sequence[ReplicaReport]:
        """The replicas that answer now."""

    async def metrics(self) -> Mapping[str, "Sequence[Metric]"]:
        """The metrics of the replicas that answer now, by their names."""
