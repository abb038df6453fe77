"""A pool of reading processes. A thread borrows one process at a time; processes are replaced after errors."""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from llama_adapter.app.pictures.reading.process import ReadingProcess
from llama_adapter.runtime.errors import LlamaAdapterError

START_LIMIT_S = 120.0  # imports take 0.2 s, but much longer from a cold network disk
START_PAUSE_S = 0.2  # pause after a failed start: the system may be short of processes for a moment
MAX_FAILED_STARTS = 3  # in a row
MAX_UNENDING = 32


class ReadingProcessError(LlamaAdapterError):
    """No reading process can be started; `hint` says what to do."""


class ReadingCrew:
    """Has at most `num_processes` processes, which `start` makes. `num_kept` of them (default: all) are kept ready.

    Thread-safe. A forked process starts its own reading processes.
    """

    def __init__(self, start: Callable[[], ReadingProcess], *, num_processes: int, num_kept: int | None = None) -> None:
        if num_processes < 1:
            raise ValueError(f"num_processes must be at least 1, got {num_processes}")
        self._start, self._num_processes = start, num_processes
        self._num_kept = num_processes if num_kept is None else min(num_kept, num_processes)
        self._is_closed = False
        self._begin()
        _CREWS.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._places = threading.Semaphore(self._num_processes)
        self._idle: list[ReadingProcess] = []  # the last one is lent next, because its caches are warm
        self._members: set[ReadingProcess] = set()  # idle or lent
        self._unending: list[ReadingProcess] = []  # killed, but still hanging in the operating system
        self._num_failed_starts = 0  # in a row; processes that were starting at the same time count once
        self._failed_at = 0.0  # when the last one of them failed
        # Ends the processes if the pool was not closed, and at the end of the interpreter.
        self._finalizer = weakref.finalize(self, _end_all, self._members)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The ids of the running processes, in arbitrary order."""
        with self._lock:
            return tuple(process.child.process.pid for process in self._members)

    def start(self) -> None:
        """Start the processes that are kept ready, without waiting for them. Otherwise they start on demand.

        If that fails, the error is raised later, when a process is needed.
        """
        with self._lock, suppress(OSError):
            while not self._is_closed and sum(not process.is_spent for process in self._members) < self._num_kept:
                self._idle.insert(0, self._started())

    @contextmanager
    def lent(self) -> Iterator[ReadingProcess]:
        """Lend a started process. It is replaced after an exception in the block, and when it is spent.

        Raises `ReadingProcessError` if no process can be started, RuntimeError after closing.
        """
        with self._places:
            process = self._ready()
            try:
                yield process
            except BaseException:
                self._replace(process)
                raise
            if process.is_spent:
                self._replace(process)
                return
            with self._lock:
                self._idle.append(process)

    def close(self) -> None:
        """End all processes, including lent ones, whose readings then raise RuntimeError. May be called repeatedly."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for process in self._members:
                process.kill()  # the borrowing thread notices it, and ends the process
        for process in idle:
            self._discard(process)
        with self._lock:
            if not self._members:
                self._finalizer()

    def check_open(self) -> None:
        """Raise RuntimeError after closing."""
        if self._is_closed:
            raise RuntimeError("This reader of pictures was closed")

    def forget(self) -> None:
        """Called in a forked process, which has only this thread: leave the reading processes to the parent."""
        self._finalizer.detach()
        for process in (*self._members, *self._unending):
            process.child.disown()
        self._begin()

    def _ready(self) -> ReadingProcess:
        while True:
            process = None
            try:
                process = self._next()
                process.wait_until_ready(timeout_s=START_LIMIT_S)
            except OSError as error:
                self._after_failed_start(process, error)
            except BaseException:
                if process is not None:
                    self._discard(process)
                raise
            else:
                self._num_failed_starts = 0
                return process

    def _next(self) -> ReadingProcess:
        with self._lock:
            self.check_open()
            self._unending = [process for process in self._unending if not process.child.has_ended()]
            if len(self._unending) >= MAX_UNENDING:
                raise ReadingProcessError(
                    f"Reading stops: {len(self._unending)} processes that were reading pictures hang in the "
                    "operating system and cannot be ended",
                    hint="the disk or network with the pictures does not answer: repair it, then run again",
                )
            return self._idle.pop() if self._idle else self._started()

    def _started(self) -> ReadingProcess:
        """Called under the lock. Raises OSError."""
        process = self._start()
        self._members.add(process)
        return process

    def _after_failed_start(self, process: ReadingProcess | None, error: OSError) -> None:
        words = str(error)
        if process is not None:
            self._discard(process)
            if process.is_ready:  # it was idle when it ended
                return
            words = process.child.said or f"ended {process.how_it_ended()}"
        with self._lock:
            if process is None or process.started_at > self._failed_at:
                self._num_failed_starts, self._failed_at = self._num_failed_starts + 1, time.monotonic()
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            raise ReadingProcessError(
                f"No process for reading pictures can be started, {self._num_failed_starts} in a row ended "
                f"early: {words}",
                hint="raise the limits on processes, memory and open files (ulimit -u, -v, -n); for a job of pictures "
                "that you trust, `--reader thread` needs no processes",
            ) from error
        time.sleep(START_PAUSE_S)

    def _replace(self, process: ReadingProcess) -> None:
        self._discard(process)
        self.start()

    def _discard(self, process: ReadingProcess) -> None:
        is_gone = process.end()
        with self._lock:
            self._members.discard(process)
            if not is_gone:
                self._unending.append(process)


def _end_all(members: set[ReadingProcess]) -> None:
    for process in list(members):
        process.kill()
    while members:
        members.pop().end()


_CREWS: "weakref.WeakSet[ReadingCrew]" = weakref.WeakSet()


def _forget_all() -> None:
    for crew in list(_CREWS):
        crew.forget()


os.register_at_fork(after_in_child=_forget_all)
