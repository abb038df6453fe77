"""What services have in common, with one model in this process or with replicas: their unanswered requests and queue.

The HTTP API uses a service through `OnlineService`.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, Generic, TypeAlias

from llama_adapter.app.captioning.tasks.answers import Answer, TextDelta
from llama_adapter.app.captioning.tasks.prompts import prompt_length
from llama_adapter.app.models.spec import ModelInfo
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.serving.online.admission_queue import AdmissionQueue, E
from llama_adapter.app.serving.online.request_handle import Ask, RequestHandle
from llama_adapter.app.serving.online.types import Observer, ServiceLimits, ServiceStatus
from llama_adapter.llm.errors import PromptError

REPLICA_LOST: Final = "replica_lost"  # code of an error
CANCELLED: Final = AnswerError(code="cancelled", message="The request was cancelled.")
LATE_S: Final = 5.0  # grace period in which the engine thread or a replica ends a late request itself
WATCH_S: Final = 0.1  # interval between checks of deadlines
_log = logging.getLogger("llama_adapter.service")


def late(allowed_s: float) -> AnswerError:
    """The error for a request that has no complete answer after `allowed_s` seconds."""
    return AnswerError(
        code="deadline", message=f"There was no complete answer within {allowed_s:g} s; ask again later."
    )


class QueuedService(ABC, Generic[E]):
    """Answers requests of many clients. Thread-safe."""

    def __init__(self, limits: ServiceLimits, observer: Observer | None) -> None:
        self.limits = limits
        self._observer = observer or Observer()
        self._changed = threading.Condition()  # guards the state, the queue and the entries
        self._queue: AdmissionQueue[E] = AdmissionQueue(limits)
        self._entries: dict[int, E] = {}  # unanswered requests, by the id of their handle
        self._num_submitted = 0
        self._is_draining = False
        self._last_error: str | None = None
        self._started = time.perf_counter()

    @property
    @abstractmethod
    def info(self) -> ModelInfo:
        """The loaded model. Raises UnavailableError while no model is loaded."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Number of requests answered together. Raises UnavailableError while no model is loaded."""

    @abstractmethod
    def submit(self, ask: Ask) -> RequestHandle:
        """Accept a request. Does not block.

        Raises BusyError and UnavailableError for a request that may be sent again later, and PromptTooLongError,
        PromptError and ValueError for a request that cannot be answered.
        """

    @abstractmethod
    def status(self) -> ServiceStatus:
        """The current status."""

    @abstractmethod
    def close(self) -> None:
        """End the service; pending requests are answered with an error. Can be called again."""

    def drain(self) -> None:
        """Accept no more requests; finish the accepted ones."""
        with self._changed:
            self._is_draining = True

    def wait_until_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until all requests are answered; returns whether that happened in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._entries, timeout_s)

    def _check_sizes(self, ask: Ask) -> None:
        """Raise PromptError for long texts, before they are tokenised."""
        limit = self.limits.max_prompt_chars
        if (length := prompt_length(ask.prompt)) > limit:
            raise PromptError(f"The prompt is {length:,} long, {limit:,} is the limit", hint="shorten the prompt")
        if sum(map(len, ask.task.continuations)) > limit:
            raise PromptError(f"The choices have more than {limit:,} characters", hint="give fewer or shorter ones")

    def _new_handle(self) -> RequestHandle:
        self._num_submitted += 1
        return RequestHandle(self._num_submitted, cancel=self._cancel)

    def _enter(self, entry: E) -> None:
        if not self._entries:
            self._queue.note_start(time.perf_counter())
        self._entries[entry.handle.id] = entry
        self._queue.add(entry)

    def _cancel(self, handle: RequestHandle) -> None:
        with self._changed:
            entry = self._entries.get(handle.id)
            is_waiting = entry is not None and self._queue.remove(entry)
            self._changed.notify_all()
        if entry is not None and is_waiting:
            self._fail(entry, CANCELLED)
        elif entry is not None:
            self._stop(entry)

    def _stop(self, entry: E) -> None:
        """Called when a request that has left the queue is cancelled, and when a request is late."""

    def _end_all(self) -> None:
        """Cancel all requests."""
        with self._changed:
            entries = list(self._entries.values())
            for entry in entries:
                self._queue.remove(entry)
        for entry in entries:
            self._fail(entry, CANCELLED)

    def _fail_late(self) -> None:
        """Fail the requests whose time is over. One that has left the queue may end by itself within `LATE_S`."""
        with self._changed:
            now = time.perf_counter()
            overdue = [
                entry
                for entry in self._entries.values()
                if now > entry.deadline + (0.0 if entry in self._queue else LATE_S)
            ]
            for entry in overdue:
                self._queue.remove(entry)
        for entry in overdue:
            self._fail(entry, late(entry.allowed_s))
            self._stop(entry)

    def _fail(self, entry: E, error: AnswerError) -> None:
        self._finish(entry, entry.failed(error))

    def _finish(self, entry: E, answer: Answer) -> None:
        """Deliver the answer of a request; ignored if the request has an answer already."""
        with self._changed:
            if entry.is_done:
                return
            entry.is_done = True
            now = time.perf_counter()
            del self._entries[entry.handle.id]
            if answer.error is None:
                self._queue.note_finish(now)
            self._changed.notify_all()
        entry.handle.deliver(answer)
        seconds = now - entry.handle.submitted
        if answer.error is None and not entry.has_text:
            self._tell(self._observer.first_token, seconds)
        self._tell(self._observer.finished, answer, seconds)

    def _deliver_text(self, entry: E, piece: TextDelta) -> None:
        if entry.is_done:
            return
        if not entry.has_text:
            entry.has_text = True
            self._tell(self._observer.first_token, time.perf_counter() - entry.handle.submitted)
        entry.handle.deliver(piece)

    def _tell(self, observe: Callable[..., None], *values: object) -> None:
        """Call the observer. Its errors are logged and do not affect answers."""
        try:
            observe(*values)
        except Exception as error:
            _log.error("the observer raised %s in %s", type(error).__name__, observe.__name__)


OnlineService: TypeAlias = QueuedService[Any]
