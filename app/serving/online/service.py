"""A service: the requests of many clients share the batches of one captioner.

The path of a request: `submit` -> `_look` (is its picture in the cache?) -> the reading pool -> the admission queue ->
`_admit` -> the engine's step -> its handle. Only the engine thread loads, uses and closes the model.
"""

import gc
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from llama_adapter.app.captioning.caption_loop import CaptionLoop
from llama_adapter.app.captioning.captioner import Captioner, ModelInfo
from llama_adapter.app.captioning.encoded_pictures import EncodedPicture, EncodedPictures
from llama_adapter.app.captioning.stage_clock import STAGES, StageClock
from llama_adapter.app.captioning.tasks.answers import Answer, Event
from llama_adapter.app.captioning.tasks.prompts import EncodedPrompt
from llama_adapter.app.models.spec import PLAIN_MODES, CaptionerSpec
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.reading.isolated import IsolatedReader
from llama_adapter.app.pictures.reading.prefetch import num_reading_threads
from llama_adapter.app.pictures.reading.reader import PictureReading, joined, joined_digest
from llama_adapter.app.serving.online.admission_queue import Entry
from llama_adapter.app.serving.online.base import CANCELLED, WATCH_S, QueuedService, late
from llama_adapter.app.serving.online.reading_pool import (
    READING_FAILED,
    ReadingDroppedError,
    ReadingPool,
    ReadingTask,
)
from llama_adapter.app.serving.online.request_handle import Ask, RequestHandle
from llama_adapter.app.serving.online.types import (
    BusyError,
    Observer,
    ServiceLimits,
    ServiceStatus,
    State,
    UnavailableError,
)
from llama_adapter.llm.errors import PromptError, PromptTooLongError
from llama_adapter.llm.picture_format import Grid
from llama_adapter.runtime.problems import describe, is_out_of_memory
from llama_adapter.vision.backends.base import as_array

_READERS_FAILED_S = 10.0  # for this long after a reader failure, the service counts as stalled
_CLOSE_S = 10.0  # maximum time that `close` waits for the engine thread
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.2, 30.0  # wait before the engine is loaded again; doubled after each failure

_log = logging.getLogger("llama_adapter.service")
_READING_FAILED = AnswerError(code=READING_FAILED, message="The server could not read the picture; try again later.")


def load_warm(spec: CaptionerSpec, *, tell: Callable[[str], None]) -> Captioner:
    """Load a captioner, pass its notes to `tell`, and compile the programs of a graph mode."""
    captioner = Captioner.from_spec(spec)
    for note in captioner.info.notes:
        tell(f"note: {note}")
    if captioner.info.mode not in PLAIN_MODES:
        warm_up = captioner.warm_up()
        tell(f"warm-up: {warm_up.programs} programs ready in {warm_up.seconds:.1f} s")
    return captioner


class Service(QueuedService[Entry]):
    """Answers requests of many clients with one captioner. Thread-safe."""

    def __init__(
        self,
        load: Callable[[], Captioner],
        *,
        limits: ServiceLimits | None = None,
        observer: Observer | None = None,
    ) -> None:
        """`load` makes the captioner. The engine thread calls it, at the start and after an engine failure."""
        super().__init__(limits or ServiceLimits(), observer)
        self._load = load
        self._closing = threading.Event()
        self._ends_by: float | None = None  # `time.perf_counter()`, set by `close`
        self._state: State = "loading"
        self._load_error: BaseException | None = None
        self._restarts, self._num_fruitless = 0, 0  # fruitless: failures since the last answer
        self._num_put_back = 0
        self._captioner: Captioner | None = None
        self._pool: ReadingPool | None = None  # set when the first model is loaded
        self._readers_failed_at: float | None = None  # time of the last failure; None after a success
        self._running: dict[int, Entry] = {}  # requests in the loop, by handle id; belongs to the engine thread
        self._encoded = EncodedPictures(max_bytes=self.limits.encoded_bytes)
        self._stage_seconds = dict.fromkeys(STAGES, 0.0)
        self._heartbeat = time.perf_counter()
        # A separate thread looks up cached pictures, so that they do not wait for slow readings.
        self._looking = ThreadPoolExecutor(1, thread_name_prefix="look")
        self._threads = [
            threading.Thread(target=self._main, name="engine", daemon=True),
            threading.Thread(target=self._watch, name="deadlines", daemon=True),
        ]

    def start(self) -> None:
        """Start loading the model. Does not block."""
        for thread in self._threads:
            thread.start()

    def wait_until_ready(self, timeout_s: float | None = None) -> None:
        """Wait until the model is loaded. Raises the error of loading it, or TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._state != "loading", timeout_s):
                raise TimeoutError(f"The model is not loaded after {timeout_s} s")
            if self._load_error is not None:
                raise self._load_error

    @property
    def info(self) -> ModelInfo:
        return self._loaded().info

    @property
    def spec(self) -> CaptionerSpec:
        """The spec of the loaded model, with all values resolved. Raises UnavailableError while no model is loaded."""
        return self._loaded().spec

    @property
    def batch_size(self) -> int:
        return self._loaded().batch_size

    def submit(self, ask: Ask) -> RequestHandle:
        captioner = self._loaded()
        self._check_sizes(ask)
        grids = captioner.least_grids(len(ask.pictures))
        prompt = _encoded(captioner, ask, grids)
        text_prefix = captioner.info.text_prefix(ask.text_prefix)
        if ask.picture is not None:
            captioner.info.require_sight()
        with self._changed:
            if self._is_draining or self._state != "ready":
                raise self._unavailable()
            num_slow = 0 if self._pool is None else self._pool.num_slow_waiting
            self._queue.check(ask, num_slow=num_slow)
            handle, limit_s = self._new_handle(), self.limits.timeout_s
            entry = Entry(ask=ask, handle=handle, limit_s=limit_s, prompt=prompt, text_prefix=text_prefix)
            self._enter(entry)
            self._looking.submit(self._look, entry)
        return handle

    def view(
        self,
        picture: bytes,
        *,
        name: str,
        side: int,
        client: str,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Future[PictureReading]:
        """Read a picture for display: upright, at most `side` pixels wide and high. The result may be an error.

        Raises UnavailableError while no model is loaded, and BusyError while too many views are waiting. Reading ends
        early if the future is cancelled or `is_wanted` returns False. In these cases, and if the service is closed, the
        future raises `ReadingDroppedError`.
        """
        pool = self._reading_pool()
        if (num_bytes := pool.num_view_bytes) and num_bytes + len(picture) > self.limits.max_side_bytes:
            raise BusyError("Too many pictures are waiting to be shown", hint="try again later", retry_after_s=1.0)
        future: Future[PictureReading] = Future()
        pool.submit(
            ReadingTask(
                picture=picture,
                name=name,
                client=client,
                side=side,
                is_wanted=lambda: is_wanted() and not future.done(),
                deliver=partial(_fulfil, future),
            )
        )
        return future

    def visual_features(self, digest: str) -> np.ndarray | None:
        """Numbers that are close for pictures that look alike to the model: float32 (N * H,).

        They are the gated values of the last adapter layer, averaged over the visual queries; or the mean of the whole
        picture's tokens. None if the picture with this SHA-256 is not in the cache.
        """
        if (picture := self._encoded.find(digest)) is None:
            return None
        whole = picture.squares[-1].embeddings_SD if picture.squares else picture.prefix.v[-1, 0]
        return as_array(whole.mean(-2)).ravel()

    def status(self) -> ServiceStatus:
        with self._changed:
            now = time.perf_counter()
            num_waiting = len(self._queue)
            num_reading, num_slow = (0, 0) if self._pool is None else self._pool.counts()
            is_at_work = self._state == "ready" and bool(self._running)
            failed_at = self._readers_failed_at
            return ServiceStatus(
                state="draining" if self._is_draining and self._state == "ready" else self._state,
                is_stalled=(failed_at is not None and now - failed_at < _READERS_FAILED_S)
                or (is_at_work and now - self._heartbeat > self.limits.stall_s),
                num_running=len(self._entries) - num_waiting,
                num_waiting=num_waiting,
                num_reading=num_reading,
                num_slow_reading=num_slow,
                num_encoded=len(self._encoded),
                num_put_back=self._num_put_back,
                restarts=self._restarts,
                last_error=self._last_error,
                uptime_s=now - self._started,
            )

    def stage_seconds(self) -> dict[str, float]:
        """Busy seconds by stage since the start: of the engine thread, and for `read` of the reading processes."""
        with self._changed:
            return dict(self._stage_seconds)

    def close(self) -> None:
        """End the threads and close the model; pending requests are answered with an error. Can be called again.

        Waits at most 10 s for the current step or the loading of the model, and kills the reading processes. If a step
        hangs, its daemon thread is left running.
        """
        self._closing.set()
        with self._changed:
            self._ends_by = self._ends_by or time.perf_counter() + _CLOSE_S
            if self._state != "failed":
                self._state = "closed"
            self._changed.notify_all()
        self._end_all()  # before the engine thread has ended
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, self._ends_by - time.perf_counter()))
        self._looking.shutdown(wait=False, cancel_futures=True)
        if self._pool is not None:
            self._pool.close(timeout_s=max(0.0, self._ends_by - time.perf_counter()))

    # Called by any thread

    def _loaded(self) -> Captioner:
        if (captioner := self._captioner) is None:
            raise self._unavailable()
        return captioner

    def _unavailable(self) -> UnavailableError:
        if self._is_draining or self._state in ("closed", "failed"):
            return UnavailableError("The service is shutting down" if self._state != "failed" else "No model is loaded")
        reason = "The model is being loaded" if self._state == "loading" else "The engine failed and is restarting"
        return UnavailableError(reason, hint="try again later", retry_after_s=2.0)

    def _finish(self, entry: Entry, answer: Answer) -> None:
        if answer.error is None:
            self._num_fruitless = 0
        super()._finish(entry, answer)
        for task in entry.tasks:
            self._reading_pool().discard(task)
        entry.tasks = ()  # they refer to the entry, and a cycle would keep its pictures in memory

    # Called by the thread that looks up pictures in the cache, and by the threads of the reading pool

    def _look(self, entry: Entry) -> None:
        """Send the picture to the reading pool, unless it is in the cache."""
        started = time.perf_counter()
        if entry.is_done:
            return
        if entry.ask.picture is None:
            self._note_reading(entry, PictureReading(digest=entry.text_prefix))
            return
        digest = joined_digest([hashlib.sha256(picture).hexdigest() for picture in entry.ask.pictures])
        if self._encoded.find(digest) is None:
            self._read(entry)
            return
        elapsed_ms = (time.perf_counter() - started) * 1e3
        self._note_reading(entry, PictureReading(digest=digest, elapsed_ms=elapsed_ms))

    def _read(self, entry: Entry) -> None:
        entry.reading, readings = None, dict[int, PictureReading]()
        entry.tasks = tuple(
            ReadingTask(
                picture=picture,
                name=entry.ask.label,
                client=entry.ask.client,
                is_wanted=lambda: not entry.is_done,
                deliver=partial(self._note_one, entry, readings, index),
            )
            for index, picture in enumerate(entry.ask.pictures)
        )
        for task in entry.tasks:
            self._reading_pool().submit(task)

    def _note_one(
        self, entry: Entry, readings: dict[int, PictureReading], index: int, reading: PictureReading | Exception
    ) -> None:
        """Note the reading of one of a request's pictures; the last one completes the request's."""
        if isinstance(reading, Exception):
            self._reading_failed(entry, reading)
            return
        with self._changed:
            readings[index] = reading
            is_complete = len(readings) == len(entry.ask.pictures)
        if is_complete:
            self._note_reading(entry, joined([readings[index] for index in range(len(readings))]))

    def _note_reading(self, entry: Entry, reading: PictureReading) -> None:
        with self._changed:
            entry.reading = reading
            self._readers_failed_at = None
            self._queue.make_ready(entry)
            self._changed.notify_all()

    def _reading_failed(self, entry: Entry, error: Exception) -> None:
        """Reading failed for a reason outside the picture, such as processes that do not start."""
        if not isinstance(error, ReadingDroppedError):
            _log.error("reading a picture failed: %s", describe(error).sentence)
            with self._changed:
                self._last_error, self._readers_failed_at = _kind(error), time.perf_counter()
        with self._changed:
            self._queue.remove(entry)
        self._fail(entry, _READING_FAILED)

    def _reading_pool(self) -> ReadingPool:
        if (pool := self._pool) is None:
            raise self._unavailable()
        return pool

    def _open_pool(self, captioner: Captioner) -> None:
        """Start the reading processes, once; if that fails, close the captioner."""
        if self._pool is not None:
            return
        limits, num_fast = self.limits, num_reading_threads()
        reader = IsolatedReader(
            replace(captioner.spec.pictures, max_pixels=limits.max_pixels, max_bytes=limits.max_picture_bytes),
            pixels=captioner.pixels,
            timeout_s=limits.picture_timeout_s,
            num_processes=num_fast + limits.max_slow_pictures,
            num_kept=num_fast,
            memory_bytes=limits.reading_memory_bytes,
        )
        try:
            reader.start()
            reader.wait_until_ready()
        except BaseException:
            reader.close()
            captioner.close()
            raise
        self._pool = ReadingPool(reader, limits=limits, num_fast=num_fast)

    # Called by the deadline thread

    def _watch(self) -> None:
        """Fail late requests, even while the engine is being loaded or hangs."""
        while not self._closing.wait(WATCH_S):
            self._fail_late()

    # Called by the engine thread

    def _main(self) -> None:
        try:
            while (captioner := self._open()) is not None:
                try:
                    self._serve(captioner)
                except Exception as error:
                    self._engine_failed(error)
                try:
                    captioner.close()
                except Exception as error:  # for example of a broken encoder; the next captioner opens a new one
                    _log.error("closing the model failed: %s", describe(error).sentence)
                self._captioner = captioner = None
                self._encoded.clear()
                gc.collect()  # free memory for the next model
        finally:
            with self._changed:
                if not self._closing.is_set():
                    self._state = "failed"  # no thread answers requests any more
            self._end_all()

    def _open(self) -> Captioner | None:
        """Load the model; None once the service is closed. Loading is retried if it has succeeded before."""
        while True:
            if self._closing.wait(self._backoff_s()):
                return None
            try:
                captioner = self._load()
                self._open_pool(captioner)
            except BaseException as error:
                with self._changed:
                    if self._state == "loading":
                        self._state, self._load_error = "failed", error
                        self._changed.notify_all()
                        return None
                    self._num_fruitless += 1
                    self._last_error = _kind(error)
                _log.error("reloading the engine failed: %s", describe(error).sentence)
                continue
            with self._changed:
                self._captioner = captioner
                if not self._closing.is_set():
                    self._state = "ready"
                self._heartbeat = time.perf_counter()
                self._changed.notify_all()
            return captioner

    def _backoff_s(self) -> float:
        if not self._num_fruitless:
            return 0.0
        doublings = min(self._num_fruitless - 1, 32)  # avoids a float overflow
        return min(_FIRST_BACKOFF_S * 2.0**doublings, _MAX_BACKOFF_S)

    def _serve(self, captioner: Captioner) -> None:
        """Answer requests until the service is closed."""
        clock, num_put_back = StageClock(), self._num_put_back
        with captioner.open_loop(clock) as loop:
            while self._wait_for_work(loop, clock):
                self._sweep(loop)
                self._admit(loop)
                if loop.in_flight:
                    events = loop.step()
                    self._num_put_back = num_put_back + loop.num_put_back
                    self._deliver(events)
                for stage, seconds in clock.take().items():
                    if seconds:
                        self._note_stage(stage, seconds)

    def _wait_for_work(self, loop: CaptionLoop, clock: StageClock) -> bool:
        """Wait for a request; returns False once the service is closed."""
        with self._changed:
            if not loop.in_flight and not self._queue.has_ready:
                clock.stop()
                self._changed.wait_for(lambda: self._queue.has_ready or self._closing.is_set())
            self._heartbeat = time.perf_counter()
            return not self._closing.is_set()

    def _sweep(self, loop: CaptionLoop) -> None:
        """Remove cancelled and late requests from the engine."""
        now = time.perf_counter()
        for entry in list(self._running.values()):
            if entry.is_done or entry.handle.is_cancelled or now > entry.deadline:
                loop.cancel(entry.request_id)
                del self._running[entry.handle.id]
                self._fail(entry, CANCELLED if entry.handle.is_cancelled else late(entry.allowed_s))

    def _admit(self, loop: CaptionLoop) -> None:
        """Fill free slots: encode new pictures and submit requests."""
        readable: list[Entry] = []
        num_background = sum(entry.ask.is_background for entry in self._running.values())
        # Background requests leave one row free, so that other requests need not wait for one of them to end.
        for entry in self._take_ready(loop.num_free, most_background=max(1, loop.num_rows - 1) - num_background):
            self._note_stage("read", entry.read.elapsed_ms / 1e3)
            error = entry.read.error or self._complete_prompt(entry)
            if error is None:
                readable.append(entry)
                continue
            del self._running[entry.handle.id]
            self._finish(entry, entry.in_loop.failed(error))
        for entry, picture in zip(readable, self._encode(readable, loop), strict=True):
            entry.request_id = loop.submit(entry.in_loop, picture)

    def _complete_prompt(self, entry: Entry) -> AnswerError | None:
        """Encode a prompt whose pictures are tokens again, now that their number is known; returns what prevents it."""
        ask, captioner = entry.ask, self._loaded()
        grids = captioner.grids_of(entry.read) if entry.encoded is None else entry.encoded.grids
        if grids == captioner.least_grids(len(grids)):
            return None
        try:
            prompt = _encoded(captioner, ask, grids)
        except (PromptError, ValueError) as refusal:
            return AnswerError(code="prompt", message=str(refusal))
        entry.in_loop.prompt = prompt
        return None

    def _take_ready(self, count: int, *, most_background: int) -> list[Entry]:
        """As `AdmissionQueue.take_ready`. Requests whose picture the cache has dropped are sent to reading again."""
        taken: list[Entry] = []
        forgotten: list[Entry] = []
        with self._changed:
            for entry in self._queue.take_ready(count, most_background=most_background):
                entry.encoded = self._encoded.find(entry.read.digest)
                if entry.encoded is None and entry.read.is_only_digest:
                    self._queue.add(entry)
                    forgotten.append(entry)
                    continue
                entry.active = entry.activate()
                if entry.ask.is_background:
                    entry.deadline = time.perf_counter() + entry.allowed_s
                self._running[entry.handle.id] = entry
                taken.append(entry)
        for entry in forgotten:
            self._read(entry)
        return taken

    def _encode(self, asked: Sequence[Entry], loop: CaptionLoop) -> list[EncodedPicture]:
        """The encoded picture of each request. A picture that several requests share is encoded once."""
        pictures: dict[str, EncodedPicture] = {}
        new: dict[str, Entry] = {}
        for entry in asked:
            digest = entry.read.digest
            entry.in_loop.is_reused = entry.encoded is not None or digest in new
            if entry.encoded is not None:
                pictures[digest] = entry.encoded
            else:
                new.setdefault(digest, entry)
        if new:
            found, clip_ms = loop.encode([entry.read.content for entry in new.values()])
            for (digest, entry), picture in zip(new.items(), found, strict=True):
                pictures[digest] = self._encoded.keep(digest, picture._replace(notes=entry.read.notes))
                entry.in_loop.ms["clip"] = clip_ms
        return [pictures[entry.read.digest] for entry in asked]

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            entry = self._running[event.index]
            if isinstance(event, Answer):
                del self._running[event.index]
                self._finish(entry, event)
            else:
                self._deliver_text(entry, event)

    def _note_stage(self, stage: str, seconds: float) -> None:
        with self._changed:
            self._stage_seconds[stage] += seconds
        self._tell(self._observer.stage, stage, seconds)

    def _engine_failed(self, error: Exception) -> None:
        """Fail the requests in the engine. Waiting requests stay in the queue."""
        problem = describe(error)
        _log.error("the engine failed and is reloaded: %s", problem.sentence)
        with self._changed:
            self._restarts += 1
            self._num_fruitless += 1
            self._last_error = _kind(error)
            if self._state == "ready":
                self._state = "restarting"
            running = list(self._running.values())
            self._running.clear()
            self._changed.notify_all()
        if is_out_of_memory(error):
            code = "out_of_memory"
        else:  # for example a lost rank, which is not the request's fault
            code = "unavailable" if problem.http_status == 503 else "engine_failed"
        for entry in running:
            self._fail(entry, AnswerError(code=code, message="The engine failed during this request; try again."))


def _fulfil(future: Future[PictureReading], reading: PictureReading | Exception) -> None:
    with suppress(InvalidStateError):  # cancelled
        if isinstance(reading, Exception):
            future.set_exception(reading)
        else:
            future.set_result(reading)


def _encoded(captioner: Captioner, ask: Ask, grids: tuple[Grid, ...]) -> EncodedPrompt:
    """The prompt of a request. Raises as `encode_prompt`, and PromptTooLongError without room for the answer."""
    prompt = captioner.encode_prompt(ask.prompt, ask.task, sampling=ask.sampling, grids=grids)
    if (needed := len(prompt.token_ids) + ask.least_room) > captioner.info.context:
        raise PromptTooLongError(needed, captioner.info.context)
    return prompt


def _kind(error: BaseException) -> str:
    """The error's type, for clients. The message is left out, because it may contain paths."""
    return f"{type(error).__name__}; the log says more"
