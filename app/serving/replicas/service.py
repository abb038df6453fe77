"""A service over replicas: one queue for the requests of all clients. Each request goes to a replica that has room.

The path of a request: `submit` -> the admission queue -> `_hand_out` -> a replica -> its handle. A lock guards the
queue and the unanswered requests; everything else runs in one event loop.
"""

import asyncio
import dataclasses
import hashlib
import logging
import math
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.models.spec import CaptionerSpec, ModelInfo
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.serving.online.admission_queue import Accepted
from llama_adapter.app.serving.online.base import CANCELLED, LATE_S, REPLICA_LOST, WATCH_S, QueuedService, late
from llama_adapter.app.serving.online.request_handle import Ask, RequestHandle
from llama_adapter.app.serving.online.room import cancel_all
from llama_adapter.app.serving.online.types import Observer, ServiceLimits, ServiceStatus, State, UnavailableError
from llama_adapter.app.serving.replicas.types import ReplicaLostError, ReplicaReport, Replicas
from llama_adapter.runtime.problems import describe

if TYPE_CHECKING:
    from prometheus_client.core import Metric

MAX_TRIES = 3  # per request, if its replica is lost or its engine restarts before the client got any text
_REPORT_S = 1.0  # time between two reports of the replicas
_PAUSE_S = 0.2  # pause before another try
_METRICS_S = 5.0  # timeout for the replicas' metrics
_INLINE_BYTES = 2**20  # a picture up to this size is hashed in the event loop: starting a thread takes as long

_log = logging.getLogger("llama_adapter.service")
_LOST = AnswerError(code=REPLICA_LOST, message="The replica that had this request has ended; try again.")
_FAILED = AnswerError(code="internal_error", message="The request could not be given to a replica; see the log.")


@dataclass(eq=False, kw_only=True, slots=True)
class _Entry(Accepted):
    """A request inside the service over replicas."""

    task: asyncio.Task[Answer] | None = None  # set when the request is handed out
    digest: str = ""  # digest of its picture, set when the request is handed out

    def failed(self, error: AnswerError) -> Answer:
        """The answer to this request with an error."""
        total_ms = (time.perf_counter() - self.handle.submitted) * 1e3
        return Answer.failed(
            error, picture=self.ask.label, index=self.handle.id, digest=self.digest, ms={"total": total_ms}
        )


class ReplicatedService(QueuedService[_Entry]):
    """Answers requests of many clients with the replicas of one model. Thread-safe."""

    def __init__(self, replicas: Replicas, *, limits: ServiceLimits, observer: Observer | None = None) -> None:
        """`limits` apply to the queue, as in `online.service.Service`. Replicas apply those of reading pictures."""
        super().__init__(limits, observer)
        self._replicas = replicas
        self._handed_out: set[_Entry] = set()
        self._num_gone = 0
        self._reports: Sequence[ReplicaReport] = ()
        self._first: ReplicaReport | None = None
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="replicas", daemon=True)
        self._look_now: asyncio.Event | None = None  # used in the event loop only

    def start(self) -> None:
        """Start to watch the replicas. Does not block."""
        self._thread.start()
        self._soon(self._watch())
        self._soon(self._watch_deadlines())

    def wait_until_ready(self, timeout_s: float | None = None) -> None:
        """Wait for the first replica; raises TimeoutError after `timeout_s` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._first is not None, timeout_s):
                raise TimeoutError(f"No replica is ready after {timeout_s} s")

    # Any thread

    @property
    def info(self) -> ModelInfo:
        """The model of the first replica; raises UnavailableError while there is no replica."""
        return self._known().info

    @property
    def spec(self) -> CaptionerSpec:
        """The complete spec of this model; raises UnavailableError while there is no replica."""
        return self._known().spec

    @property
    def batch_size(self) -> int:
        """The sum of the batch sizes of all replicas; raises UnavailableError while there is no replica."""
        rows = cast(int, self._known().spec.batch_size)  # the spec of a loaded model has no "auto"
        return rows * max(1, len(self._reports))

    def submit(self, ask: Ask) -> RequestHandle:
        """See `QueuedService.submit`. Prompts that are too long raise nothing.

        Only replicas can detect these, so the answer has the error.
        """
        info = self.info
        self._check_sizes(ask)
        info.text_prefix(ask.text_prefix)
        if ask.picture is not None:
            info.require_sight()
        with self._changed:
            if self._state() != "ready":
                raise self._unavailable()
            self._queue.check(ask)
            entry = _Entry(ask=ask, handle=self._new_handle(), limit_s=self.limits.timeout_s)
            self._enter(entry)
            self._queue.make_ready(entry)
        self._loop.call_soon_threadsafe(self._hand_out)
        return entry.handle

    def status(self) -> ServiceStatus:
        """The current status; `restarts` counts the replicas that have ended."""
        with self._changed:
            reports = [report.status for report in self._reports]
            return ServiceStatus(
                state=self._state(),
                is_stalled=bool(reports) and all(status.is_stalled for status in reports),
                num_running=len(self._handed_out),
                num_waiting=len(self._queue),
                num_reading=sum(status.num_reading for status in reports),
                num_slow_reading=sum(status.num_slow_reading for status in reports),
                num_encoded=sum(status.num_encoded for status in reports),
                num_put_back=sum(status.num_put_back for status in reports),
                restarts=self._num_gone,
                last_error=self._last_error,
                uptime_s=time.perf_counter() - self._started,
            )

    def replicas(self) -> Sequence[ReplicaReport]:
        """The latest reports of the replicas."""
        return self._reports

    def replica_metrics(self) -> "Mapping[str, Sequence[Metric]]":
        """The present metrics of each replica; empty if the replicas do not answer in time. Blocks."""
        if self._is_closed:
            return {}
        asked: Future[Mapping[str, Sequence[Metric]]] = self._soon(self._replicas.metrics())
        try:
            return asked.result(_METRICS_S)
        except Exception as error:
            asked.cancel()
            _log.warning("the metrics of the replicas are missing: %s", type(error).__name__)
            return {}

    def close(self) -> None:
        """End the service; pending requests are answered with an error. The replicas stay. Can be called again."""
        with self._changed:
            is_first, self._is_closed = not self._is_closed, True
            self._changed.notify_all()
        self._end_all()
        if is_first and self._thread.is_alive():
            with suppress(TimeoutError):
                self._soon(cancel_all()).result(LATE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(LATE_S)
        if is_first and not self._thread.is_alive():
            self._loop.close()

    def _known(self) -> ReplicaReport:
        if self._first is None:
            raise self._unavailable()
        return self._first

    def _state(self) -> State:
        if self._is_closed:
            return "closed"
        if self._is_draining:
            return "draining"
        if self._first is None:
            return "loading"
        return "ready" if any(report.status.state == "ready" for report in self._reports) else "restarting"

    def _unavailable(self) -> UnavailableError:
        state = self._state()
        if state in ("closed", "draining"):
            return UnavailableError("The service is shutting down")
        reason = "The replicas are being loaded" if state == "loading" else "All replicas are restarting"
        return UnavailableError(reason, hint="try again later", retry_after_s=2.0)

    def _stop(self, entry: _Entry) -> None:
        if not self._is_closed:
            self._loop.call_soon_threadsafe(_stop, entry)

    def _soon(self, work: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # The event loop

    async def _watch(self) -> None:
        """Ask the replicas for reports every second, and at once when one is lost."""
        self._look_now = asyncio.Event()
        while True:
            self._look_now.clear()
            try:
                reports = await self._replicas.reports()
            except Exception as error:  # the previous reports are kept
                _log.warning("the replicas do not report their state: %s", describe(error).sentence)
            else:
                self._take(reports)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._look_now.wait(), _REPORT_S)

    async def _watch_deadlines(self) -> None:
        """Fail late requests, which ends them in their replicas too."""
        while True:
            await asyncio.sleep(WATCH_S)
            self._fail_late()

    def _take(self, reports: Sequence[ReplicaReport]) -> None:
        names = {report.name for report in reports}
        with self._changed:
            if reports and self._first is None:
                self._first = reports[0]
            before = {report.name for report in self._reports}
            self._num_gone += len(before - names)
            self._reports = reports
            self._changed.notify_all()
        for report in reports:
            if report.name not in before:
                _log.info("replica %s is ready: process %d on %s", report.name, report.pid, report.host)
        for name in before - names:
            _log.info("replica %s is gone", name)
        self._hand_out()

    def _hand_out(self) -> None:
        """Give waiting requests to the replicas, as far as they have room."""
        with self._changed:
            num_ready = sum(report.status.state == "ready" for report in self._reports)
            room = self._replicas.max_ongoing_requests * num_ready
            num_background = sum(entry.ask.is_background for entry in self._handed_out)
            # Background requests leave one place of each replica free, as in a service with one model.
            most_background = max(1, room - num_ready) - num_background
            taken = self._queue.take_ready(room - len(self._handed_out), most_background=most_background)
            self._handed_out.update(taken)
        for entry in taken:
            entry.task = self._loop.create_task(self._answer(entry))
            entry.task.add_done_callback(partial(self._end, entry))

    async def _answer(self, entry: _Entry) -> Answer:
        """The answer to one request."""
        try:
            if entry.ask.picture is not None:
                entry.digest = await _digest(entry.ask.picture)
            return await self._try(entry)
        except Exception as error:
            _log.error("a request could not be given to a replica: %s", describe(error).sentence)
            return entry.failed(_FAILED)

    def _end(self, entry: _Entry, task: asyncio.Task[Answer]) -> None:
        """Deliver the answer of a task, and use its place. A task that is cancelled before it begins comes here too."""
        with self._changed:
            self._handed_out.discard(entry)
        self._finish(entry, entry.failed(CANCELLED) if task.cancelled() else task.result())
        self._hand_out()

    async def _try(self, entry: _Entry) -> Answer:
        """The answer of a replica. If it fails before the client got any text, another replica is tried."""
        session = entry.digest
        for number in range(1, MAX_TRIES + 1):
            if number > 1:
                await asyncio.sleep(_PAUSE_S * (number - 1))
            may_try_again = number < MAX_TRIES
            try:
                answer = await self._ask(entry, session=session)
            except ReplicaLostError as error:
                self._note_loss(error)
                if entry.has_text:
                    break
                continue
            is_unavailable = answer.error is not None and answer.error.code == "unavailable"
            if entry.has_text or not (is_unavailable and may_try_again):
                return answer
            session = ""  # the replica's engine restarts or has lost a rank: any replica may answer
        return entry.failed(_LOST)

    async def _ask(self, entry: _Entry, *, session: str) -> Answer:
        handed_out = time.perf_counter()
        if handed_out >= entry.deadline:
            return entry.failed(late(entry.allowed_s))
        left_s = entry.ask.timeout_s if math.isinf(entry.deadline) else entry.deadline - handed_out
        ask = dataclasses.replace(entry.ask, timeout_s=left_s)
        groups = self._replicas.ask(ask, session=session)
        async with aclosing(cast(Any, groups)):
            async for group in groups:
                for event in group:
                    if isinstance(event, Answer):
                        return _as_seen_here(event, entry, waited_ms=(handed_out - entry.handle.submitted) * 1e3)
                    self._deliver_text(entry, dataclasses.replace(event, index=entry.handle.id))
        raise ReplicaLostError("the events of a replica ended without an answer")

    def _note_loss(self, error: ReplicaLostError) -> None:
        _log.warning("a replica was lost during a request: %s", error)
        with self._changed:
            self._last_error = "ReplicaLostError; the log says more"
        assert self._look_now is not None, "replicas are asked once they are known"
        self._look_now.set()


def _as_seen_here(answer: Answer, entry: _Entry, *, waited_ms: float) -> Answer:
    """A replica's answer with this service's request number. Its times include the wait in this service's queue."""
    ms = {
        name: value + waited_ms if name in ("queue", "first_token", "total") else value
        for name, value in answer.ms.items()
    }
    error = answer.error
    if error is not None and error.code == "deadline":  # the replica names the time that was left
        error = late(entry.allowed_s)
    return dataclasses.replace(answer, index=entry.handle.id, ms=ms, error=error)


def _stop(entry: _Entry) -> None:
    if entry.task is not None:
        entry.task.cancel()


async def _digest(picture: bytes) -> str:
    """SHA-256 of a picture file in hexadecimal, as in answers."""
    if len(picture) <= _INLINE_BYTES:
        return hashlib.sha256(picture).hexdigest()
    return (await asyncio.to_thread(hashlib.sha256, picture)).hexdigest()
