"""One thread for everything that must happen in one thread."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Worker:
    """Runs functions one after another in a thread of its own.

    Unlike a `ThreadPoolExecutor` it still works while the interpreter exits, when a session that was not closed
    releases its device.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock, self._ended = threading.Lock(), False
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises in the thread. Raises RuntimeError after `end`."""
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            if self._ended:
                raise RuntimeError("the thread has ended")
            self._jobs.put(job)
        return future.result()

    def end(self, last: Callable[[], None], *, wait: bool) -> None:
        """Run `last`, which must not raise, after all earlier calls; then the thread ends."""
        with self._lock:
            self._ended = True
            self._jobs.put(last)
            self._jobs.put(None)
        if wait:
            self._thread.join()


def _work(jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    """Holds no reference to the `Worker`, which would keep an unused one alive."""
    while (job := jobs.get()) is not None:
        job()
        del job
