"""Reads pictures of many clients in a few processes, fairly. Slow pictures delay only other slow pictures.

There are two lanes. Every picture begins in the fast lane. A picture that takes more than `slow_after_s` of processor
time, or hangs, moves to the slow lane, where its process has a lower priority. If the slow lane is full and other
pictures wait for the fast lane, reading the slow picture is stopped, and starts again when the slow lane has a free
place. So slow pictures cannot block fast ones.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain

from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.reading.isolated import IsolatedReader
from llama_adapter.app.pictures.reading.process import ReadingProcess
from llama_adapter.app.pictures.reading.reader import PictureReading
from llama_adapter.app.serving.online.fair_queue import FairQueue
from llama_adapter.app.serving.online.types import ServiceLimits
from llama_adapter.runtime.errors import LlamaAdapterError

# Codes of `AnswerError`:
READING_BUSY = "reading_busy"  # too many slow pictures wait
READING_FAILED = "reading_failed"  # the server cannot read any pictures
# Wall time, in units of `slow_after_s`, after which reading counts as hung.
_HANGS_AFTER = 10


class ReadingDroppedError(LlamaAdapterError):
    """A picture is not read, because the request was cancelled or the service is closed."""

    http_status = 503

    def __init__(self) -> None:
        super().__init__("The picture is not read: the service is closing")


@dataclass(eq=False, kw_only=True, slots=True)
class ReadingTask:
    """One picture to read."""

    picture: bytes
    name: str  # for messages
    client: str
    is_wanted: Callable[[], bool]  # polled while the picture is read; False ends the reading
    deliver: Callable[[PictureReading | Exception], None]  # called once, unless the task is discarded
    side: int | None = None  # longest side of a view for display, in pixels; None: the encoder's square
    is_slow: bool = False  # whether it is in the slow lane
    began: float | None = None  # `time.perf_counter()` when the reading was first observed


class ReadingPool:
    """A pool with a fast and a slow lane. Thread-safe.

    `reader` needs one process for each place in both lanes. The pool closes it.
    """

    def __init__(self, reader: IsolatedReader, *, limits: ServiceLimits, num_fast: int) -> None:
        self._reader, self._limits = reader, limits
        self._changed = threading.Condition()  # guards everything below
        self._num_places = {False: num_fast, True: limits.max_slow_pictures}  # by `ReadingTask.is_slow`
        self._queues: dict[bool, FairQueue[ReadingTask]] = {False: FairQueue(), True: FairQueue()}
        self._running: set[ReadingTask] = set()
        self._is_closed = False
        # Daemon threads do not delay the end of the interpreter.
        self._threads = [
            threading.Thread(target=self._work, name=f"read {number}", daemon=True)
            for number in range(sum(self._num_places.values()))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: ReadingTask) -> None:
        """Add a picture. Does not block."""
        with self._changed:
            if not self._is_closed:
                self._queues[task.is_slow].put(task, owner=task.client)
                self._changed.notify()
                return
        task.deliver(ReadingDroppedError())

    def discard(self, task: ReadingTask) -> None:
        """Remove a waiting picture. A picture that is being read is ended through `is_wanted`."""
        with self._changed:
            self._queues[task.is_slow].remove(task, owner=task.client)

    @property
    def num_slow_waiting(self) -> int:
        """Number of requests whose pictures wait for the slow lane; views are not counted."""
        with self._changed:
            return sum(task.side is None for task in self._queues[True])

    @property
    def num_view_bytes(self) -> int:
        """Size in bytes of the picture files of waiting views."""
        with self._changed:
            waiting = chain.from_iterable(self._queues.values())
            return sum(len(task.picture) for task in waiting if task.side is not None)

    def counts(self) -> tuple[int, int]:
        """Number of pictures that are being read, and of slow pictures among them."""
        with self._changed:
            return len(self._running), sum(task.is_slow or self._hangs(task) for task in self._running)

    def close(self, *, timeout_s: float) -> None:
        """End all processes and threads; `ReadingDroppedError` is delivered for waiting pictures."""
        with self._changed:
            self._is_closed = True
            dropped = [task for queue in self._queues.values() for task in iter(queue.take, None)]
            self._changed.notify_all()
        for task in dropped:
            task.deliver(ReadingDroppedError())
        self._reader.close()
        ends_by = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, ends_by - time.monotonic()))

    def _work(self) -> None:
        while (task := self._take()) is not None:
            result: PictureReading | Exception
            try:
                if not task.is_wanted():
                    raise ReadingDroppedError
                result = self._reader.read(
                    task.picture,
                    name=task.name,
                    # The process then returns the digest first, so that a crash can be attributed to the picture.
                    wants_pixels=lambda digest: True,
                    side=task.side,
                    keep_waiting=partial(self._keep_waiting, task),
                )
            except _PostponedError:
                self._leave(task)
                self._postpone(task)
                continue
            except Exception as error:
                result = error
            self._leave(task)
            task.deliver(result)

    def _take(self) -> ReadingTask | None:
        """Wait for a picture and a free place in its lane; None once the pool is closed."""
        with self._changed:
            while not self._is_closed:
                task = self._next(is_slow=False) or self._next(is_slow=True)
                if task is None:
                    self._changed.wait()
                else:
                    self._running.add(task)
                    return task
            return None

    def _next(self, *, is_slow: bool) -> ReadingTask | None:
        is_free = self._num_running(is_slow=is_slow) < self._num_places[is_slow]
        return self._queues[is_slow].take() if is_free else None

    def _leave(self, task: ReadingTask) -> None:
        with self._changed:
            self._running.discard(task)
            self._changed.notify()

    def _keep_waiting(self, task: ReadingTask, process: ReadingProcess, cpu_s: float) -> None:
        """Called while a picture is read, with the processor time so far: move a slow picture, drop an unwanted one."""
        if self._is_closed or not task.is_wanted():
            raise ReadingDroppedError
        if task.began is None:
            task.began = time.perf_counter()
        is_slow = cpu_s > self._limits.slow_after_s or self._hangs(task)
        if is_slow and not task.is_slow:
            self._move_to_slow_lane(task)
        if task.is_slow and not process.is_spent:
            process.slow_down()
            self._reader.start()  # a new process for the fast lane

    def _hangs(self, task: ReadingTask) -> bool:
        seconds = 0.0 if task.began is None else time.perf_counter() - task.began
        return seconds > _HANGS_AFTER * self._limits.slow_after_s

    def _move_to_slow_lane(self, task: ReadingTask) -> None:
        with self._changed:
            if self._num_running(is_slow=True) < self._num_places[True]:
                task.is_slow = True
                self._changed.notify()
            elif len(self._queues[False]):
                raise _PostponedError

    def _postpone(self, task: ReadingTask) -> None:
        """Move a picture to the queue of the slow lane, or answer it with an error if that queue is full."""
        with self._changed:
            limits, waiting = self._limits, self._queues[True]
            num_bytes = len(task.picture) + sum(len(other.picture) for other in waiting)
            fits = len(waiting) < limits.max_slow_waiting and num_bytes <= limits.max_side_bytes
            is_wanted = task.is_wanted() and not self._is_closed
            if is_wanted and fits:
                task.is_slow, task.began = True, None
                waiting.put(task, owner=task.client)
                self._changed.notify()
                return
        if not is_wanted:
            task.deliver(ReadingDroppedError())
            return
        message = "The picture takes long to read, and too many such pictures wait. Ask later, or send a smaller one."
        task.deliver(PictureReading(error=AnswerError(code=READING_BUSY, message=message)))

    def _num_running(self, *, is_slow: bool) -> int:
        return sum(task.is_slow == is_slow for task in self._running)


class _PostponedError(Exception):
    """The reading was stopped, and must be restarted in the slow lane."""
