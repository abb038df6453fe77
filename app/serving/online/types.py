"""Limits, status, errors and observers of a service."""

from dataclasses import dataclass, fields
from typing import Literal

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.runtime.errors import LlamaAdapterError
from llama_adapter.runtime.given import require_above_zero

State = Literal["loading", "ready", "restarting", "draining", "failed", "closed"]


class ServiceError(LlamaAdapterError):
    """A request is refused. `retry_after_s` is None if retrying does not help."""

    http_status = 503

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class BusyError(ServiceError):
    """The queue is full, or this client has reached its limit of waiting requests."""

    http_status = 429


class UnavailableError(ServiceError):
    """The service is loading, restarting, draining or closed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceLimits:
    """Limits of a service. Raises ValueError for values that are not positive."""

    max_waiting: int = 128  # requests in the queue
    max_waiting_per_client: int = 64  # requests of one client among them
    max_waiting_bytes: int = 512 * 2**20  # total size of their picture files
    timeout_s: float = 120.0  # from submit to the answer
    stall_s: float = 120.0  # a step that takes longer means that the service is stalled
    max_pixels: int = 50_000_000
    max_picture_bytes: int = 32 * 2**20
    picture_timeout_s: float = 20.0  # to read one picture
    reading_memory_bytes: int = 2**30  # memory of the process that reads a picture
    slow_after_s: float = 0.5  # processor time after which a picture counts as slow
    max_slow_pictures: int = 2  # slow pictures read at once, in addition to the others
    max_slow_waiting: int = 64  # slow pictures that wait, in addition to `max_waiting`
    max_prompt_chars: int = 20_000  # of the prompt; the same limit applies to all its continuations together
    encoded_bytes: int = 256 * 2**20  # size of the cache of encoded pictures, on the device; 0: no cache

    @property
    def max_side_bytes(self) -> int:
        """Limit for waiting slow pictures, and for pictures of the page: a quarter of `max_waiting_bytes` each."""
        return self.max_waiting_bytes // 4

    def __post_init__(self) -> None:
        may_be_zero = ("encoded_bytes",) if self.encoded_bytes == 0 else ()
        require_above_zero(self, *(field.name for field in fields(self) if field.name not in may_be_zero))


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceStatus:
    """State and counts of a service. It contains no data of requests."""

    state: State
    is_stalled: bool  # a step takes longer than `stall_s`, or pictures cannot be read
    num_running: int
    num_waiting: int
    num_reading: int  # pictures
    num_slow_reading: int  # slow pictures among them
    num_encoded: int  # pictures in the cache
    num_put_back: int  # how often an answer waited until others ended, because memory for its next tokens was missing
    restarts: int
    last_error: str | None
    uptime_s: float


class Observer:
    """Receives events from several threads of a service, and must not block them. This base class ignores them."""

    def first_token(self, seconds: float) -> None:
        """Seconds from submit to the first text, or to the answer if no text came before it."""

    def stage(self, stage: str, seconds: float) -> None:
        """Seconds of a stage in one pass of the engine thread; for `read`, seconds of one picture."""

    def finished(self, answer: Answer, seconds: float) -> None:
        """An answer or failure, and the seconds from submit to it."""
