"""The queue of requests before the engine: their pictures are read, then they wait for a slot.

Not thread-safe: the service holds its lock during every call.
"""

import math
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from llama_adapter.app.captioning.active_request import ActiveRequest
from llama_adapter.app.captioning.encoded_pictures import EncodedPicture
from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.captioning.tasks.prompts import EncodedPrompt
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.reading.reader import PictureReading
from llama_adapter.app.serving.online.fair_queue import FairQueue
from llama_adapter.app.serving.online.reading_pool import ReadingTask
from llama_adapter.app.serving.online.request_handle import Ask, RequestHandle
from llama_adapter.app.serving.online.types import BusyError, ServiceLimits
from llama_adapter.llm.prefix import TextPrefix

_MAX_RETRY_AFTER_S = 60.0
_MOST_PASSED = 7  # requests taken before a waiting background request, which then takes the next place


@dataclass(eq=False, kw_only=True, slots=True)
class Accepted(ABC):
    """An unanswered request. The time for its answer is the client's, and at most `limit_s`."""

    ask: Ask
    handle: RequestHandle
    limit_s: float
    allowed_s: float = field(init=False)
    deadline: float = field(init=False)  # a time of `time.perf_counter()`
    has_text: bool = False
    is_done: bool = False

    def __post_init__(self) -> None:
        wanted_s = self.ask.timeout_s
        self.allowed_s = self.limit_s if wanted_s is None else min(wanted_s, self.limit_s)
        self.deadline = math.inf if self.ask.is_background else self.handle.submitted + self.allowed_s

    @abstractmethod
    def failed(self, error: AnswerError) -> Answer:
        """The answer to this request with an error."""


E = TypeVar("E", bound=Accepted)


@dataclass(eq=False, kw_only=True, slots=True)
class Entry(Accepted):
    """A request inside the service with one model."""

    prompt: EncodedPrompt
    text_prefix: TextPrefix = "none"  # what a question without a picture attends to
    tasks: tuple[ReadingTask, ...] = ()  # of its pictures, set when reading begins
    reading: PictureReading | None = None  # set when the picture is read
    active: ActiveRequest | None = None  # set at admission
    encoded: EncodedPicture | None = None  # set at admission, if the picture is in the cache
    request_id: int = -1  # the loop's id, set when submitted

    def activate(self) -> ActiveRequest:
        """Make the request for the caption loop. Its times count from `submit`."""
        read_ms = 0.0 if self.reading is None else self.reading.elapsed_ms
        waited_ms = (time.perf_counter() - self.handle.submitted) * 1e3 - read_ms
        return ActiveRequest(
            index=self.handle.id,
            picture=self.ask.label,
            digest="" if self.reading is None else self.reading.digest,
            prompt=self.prompt,
            sampling=self.ask.sampling,
            task=self.ask.task,
            stop=self.ask.stop,
            num_logprobs=self.ask.num_logprobs,
            started=self.handle.submitted,
            ms={"queue": max(0.0, waited_ms), "read": read_ms},
        )

    def failed(self, error: AnswerError) -> Answer:
        """The answer with an error and the text so far."""
        active = self.active or self.activate()
        return active.failed(error, keep_text=True)

    @property
    def read(self) -> PictureReading:
        """The picture that was read; only for a request that is ready."""
        assert self.reading is not None
        return self.reading

    @property
    def in_loop(self) -> ActiveRequest:
        """The request in the caption loop; only for a request that is admitted."""
        assert self.active is not None
        return self.active


class AdmissionQueue(Generic[E]):
    """A fair queue of requests, with limits. Requests are compared by identity."""

    def __init__(self, limits: ServiceLimits) -> None:
        self._limits = limits
        self._ready: FairQueue[E] = FairQueue()
        self._ready_background: FairQueue[E] = FairQueue()
        self._num_passed = 0  # other requests taken since the last background request
        self._num_background = 0  # background requests among the entries
        self._entries: set[E] = set()
        self._num_of: Counter[str] = Counter()
        self._num_bytes = 0
        self._finish_times: deque[float] = deque(maxlen=64)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: object) -> bool:
        return entry in self._entries

    @property
    def has_ready(self) -> bool:
        """Whether a request is ready for the engine."""
        return len(self._ready) > 0 or len(self._ready_background) > 0

    def check(self, ask: Ask, *, num_slow: int = 0) -> None:
        """Raise BusyError if accepting a request would exceed a limit.

        `num_slow` waiting requests have slow pictures; these have their own limit and are not counted here. Background
        requests are never refused here, because their senders limit their number.
        """
        if ask.is_background:
            return
        limits, num_waiting, client = self._limits, len(self) - self._num_background - num_slow, ask.client
        if self._num_of[client] >= limits.max_waiting_per_client:
            raise BusyError(
                f"{self._num_of[client]} requests of this client wait, which is the limit per client",
                hint="wait for answers before asking more",
                retry_after_s=self._retry_after(),
            )
        if num_waiting >= limits.max_waiting or (
            self._num_bytes and self._num_bytes + ask.num_bytes > limits.max_waiting_bytes
        ):
            raise BusyError(
                f"The queue is full: {len(self)} requests with {self._num_bytes / 2**20:.0f} MiB of pictures",
                hint="ask again later",
                retry_after_s=self._retry_after(),
            )

    def add(self, entry: E) -> None:
        """Add a request whose picture must be read. If the cache dropped the picture, the request is added again."""
        self._entries.add(entry)
        self._num_of[entry.ask.client] += 1
        self._count(entry, +1)

    def make_ready(self, entry: E) -> None:
        """Mark a request as ready, after its picture was read. Ignored if the request has left the queue."""
        if entry in self._entries:
            self._ready_as(entry).put(entry, owner=entry.ask.client)

    def take_ready(self, count: int, *, most_background: int) -> list[E]:
        """Remove and return up to `count` ready requests, at most `most_background` of them background requests."""
        taken: list[E] = []
        while len(taken) < count and (entry := self._next(may_be_background=most_background > 0)) is not None:
            most_background -= entry.ask.is_background
            self._leave(entry)
            taken.append(entry)
        return taken

    def _next(self, *, may_be_background: bool) -> E | None:
        if not (may_be_background and self._ready_background):
            return self._ready.take()
        if self._ready and self._num_passed < _MOST_PASSED:
            self._num_passed += 1
            return self._ready.take()
        self._num_passed = 0
        return self._ready_background.take()

    def remove(self, entry: E) -> bool:
        """Remove a request; returns whether it was in the queue."""
        if entry not in self._entries:
            return False
        self._ready_as(entry).remove(entry, owner=entry.ask.client)
        self._leave(entry)
        return True

    def note_start(self, now: float) -> None:
        """Requests come again after an idle time, which does not count in the rate."""
        if self._finish_times:
            idle_s = now - self._finish_times[-1]
            self._finish_times = deque((time + idle_s for time in self._finish_times), self._finish_times.maxlen)

    def note_finish(self, now: float) -> None:
        """Record the time of an answer, for the estimate of `retry_after_s`."""
        self._finish_times.append(now)

    def _leave(self, entry: E) -> None:
        self._entries.discard(entry)
        self._count(entry, -1)
        self._num_of[entry.ask.client] -= 1
        if not self._num_of[entry.ask.client]:
            del self._num_of[entry.ask.client]

    def _ready_as(self, entry: E) -> FairQueue[E]:
        return self._ready_background if entry.ask.is_background else self._ready

    def _count(self, entry: E, sign: int) -> None:
        if entry.ask.is_background:
            self._num_background += sign
        else:
            self._num_bytes += sign * entry.ask.num_bytes

    def _retry_after(self) -> float:
        """Estimated seconds until the queue is half empty, at the rate of the last answers."""
        times = self._finish_times
        answer_s = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
        return min(max(len(self) / 2 * answer_s, 1.0), _MAX_RETRY_AFTER_S)
