"""What a service promises and tells of itself, as plain values: limits, status, errors, and who is told."""

from dataclasses import dataclass, fields
from typing import Literal

from llama_adapter.app.tasks.answers import Answer
from llama_adapter.runtime.errors import LlamaAdapterError

State = Literal["loading", "ready", "restarting", "draining", "failed", "closed"]


class ServiceError(LlamaAdapterError):
    """A request that is not taken now; `retry_after_s` says when it may be, None where nobody knows."""

    http_status = 503

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class BusyError(ServiceError):
    """As many requests wait as may wait, of all clients or of this one."""

    http_status = 429


class UnavailableError(ServiceError):
    """The service is loading, restarting, draining or closed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceLimits:
    """What is taken, kept and waited for at most. Raises ValueError for what cannot be meant."""

    max_waiting: int = 128  # requests behind those that are being answered
    max_waiting_per_client: int = 64  # of them
    max_waiting_bytes: int = 512 * 2**20  # of their pictures, as files
    timeout_s: float = 120.0  # from submit to the answer
    stall_s: float = 120.0  # that one step may take, before the service counts as stalled
    max_pixels: int = 50_000_000
    max_picture_bytes: int = 32 * 2**20
    picture_timeout_s: float = 20.0  # to read one picture
    reading_memory_bytes: int = 2**30  # that one picture may take in the process that reads it
    slow_after_s: float = 0.5  # of processor time; a picture that takes more to read counts as slow
    max_slow_pictures: int = 2  # slow pictures that are read at once, beside the others
    max_slow_waiting: int = 64  # slow pictures behind them, beside `max_waiting`; further ones are refused
    max_prompt_chars: int = 20_000  # of the prompt, and of all choices together
    encoded_bytes: int = 256 * 2**20  # of pictures kept encoded, on the device; 0 keeps none

    @property
    def max_slow_waiting_bytes(self) -> int:
        """Of the pictures that wait as slow ones: a quarter of what may wait in all."""
        return self.max_waiting_bytes // 4

    @property
    def max_view_bytes(self) -> int:
        """Of the pictures that wait to be shown on the page: a quarter of what requests may hold."""
        return self.max_waiting_bytes // 4

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (value > 0 or (value == 0 and field.name == "encoded_bytes")):
                raise ValueError(f"{field.name} must be above 0, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceStatus:
    """How the service is; nothing of what was asked is in it."""

    state: State
    is_stalled: bool  # a step takes longer than steps may
    num_running: int
    num_waiting: int
    num_reading: int  # pictures
    num_slow_reading: int  # of them, those that take long
    num_encoded: int  # pictures that are kept encoded
    restarts: int
    last_error: str | None
    uptime_s: float


class Observer:
    """Told what happens, by several threads of the service, which it must not keep waiting; this one does nothing."""

    def first_token(self, seconds: float) -> None:
        """From submit to the first piece of text, or to the answer where there is none before."""

    def stage(self, stage: str, seconds: float) -> None:
        """Of one pass of the engine thread; of one picture for `read`."""

    def finished(self, answer: Answer, seconds: float) -> None:
        """An answer of any kind, and the time from submit."""

    def restarted(self) -> None:
        """The engine failed and is loaded anew."""
