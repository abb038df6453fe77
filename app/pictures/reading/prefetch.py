"""Reads and resizes pictures in threads, ahead of the device that encodes them."""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, NamedTuple, Self, TypeVar

from llama_adapter.runtime.host_cpus import usable_cpus

Item = TypeVar("Item")
Result = TypeVar("Result")

# Decoding and resizing release the GIL, so threads help. More threads than this only use more memory, or, if another
# device computes, the processors that it leaves idle.
MAX_THREADS = 4
MAX_THREADS_BESIDE_DEVICE = 16
MAX_AHEAD_BYTES = 512 * 2**20
_PATIENCE_S = 1.0  # how long `take` waits for all the results that are wanted, rather than for one
_LOOK_S = 0.1  # interval between checks of `stop` while waiting


def num_reading_threads(device: str = "cpu") -> int:
    """Number of threads that read pictures on this machine while `device` computes."""
    return min(MAX_THREADS if device == "cpu" else MAX_THREADS_BESIDE_DEVICE, usable_cpus())


class _Pending(NamedTuple, Generic[Item, Result]):
    item: Item
    future: "Future[Result] | None"  # None: the item is read when it is taken, in the caller's thread
    num_bytes: int

    @property
    def is_ready(self) -> bool:
        return self.future is None or self.future.done()


class Prefetcher(Generic[Item, Result]):
    """Applies `read` to the items of `source` in threads, up to `ahead` items before they are taken.

    Fewer items are read ahead if their `num_bytes` reach `ahead_bytes` in total. Items are drawn from `source` in the
    caller's thread, or, with `may_wait`, in a separate thread. Items that are not `shareable` are read in the caller's
    thread. Results that are not `wanted` are dropped. `take` raises the exceptions of `read`, and, after all earlier
    items, the exception of `source`. Leaving the context does not wait for running reads, which may hang.
    """

    def __init__(
        self,
        source: Iterator[Item],
        read: Callable[[Item], Result],
        *,
        ahead: int,
        shareable: Callable[[Item], bool] = lambda item: True,
        num_bytes: Callable[[Item], int] = lambda item: 0,
        wanted: Callable[[Result], bool] = lambda result: True,
        ahead_bytes: int = MAX_AHEAD_BYTES,
        num_threads: int | None = None,
        may_wait: bool = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._source, self._read, self._ahead, self._shareable = source, read, ahead, shareable
        self._num_bytes, self._ahead_bytes, self._stop, self._wanted = num_bytes, ahead_bytes, stop, wanted
        self._changed = threading.Condition()  # guards the following fields; not held while an item is drawn or read
        self._pending: list[_Pending[Item, Result]] = []  # in the order they were drawn
        self._pending_bytes = 0
        self._first: list[Result] = []  # taken by `has_results`
        self._room = 0  # how many items may be pending
        self._has_ended = False  # whether the source has ended
        self._failure: BaseException | None = None  # the exception with which the source ended, if any
        self._is_closed = False
        self.is_exhausted = False  # all results were taken and no exception is left to raise; set by `take`
        self._pool = ThreadPoolExecutor(num_threads or num_reading_threads(), thread_name_prefix="read")
        # Not a thread of the pool, because the interpreter waits for those at exit.
        self._drawer = threading.Thread(target=self._draw_apart, name="draw", daemon=True) if may_wait else None
        if self._drawer is not None:
            self._drawer.start()

    def take(self, count: int, *, at_least: int | None = None) -> list[Result]:
        """Return up to `count` results that are ready, the oldest first; a slow read does not delay the others.

        Waits until `at_least` (default: `count`) results are ready or no more will come. After a second, or while
        nothing is pending, one result is enough. Does not wait once `stop` returns True.
        """
        results, self._first = self._first, []
        wanted, patient_until = count if at_least is None else at_least, time.monotonic() + _PATIENCE_S
        self._fill(max(count, self._ahead))
        while len(results) < count:
            with self._changed:
                ready = next((place for place, pending in enumerate(self._pending) if pending.is_ready), None)
                if ready is None:
                    is_patient = self._pending and time.monotonic() < patient_until
                    if len(results) >= (wanted if is_patient else min(wanted, 1)) or self._is_at_end or self._stop():
                        break
                    self._changed.wait(_LOOK_S)
                    continue
                pending = self._pending.pop(ready)
                self._pending_bytes -= pending.num_bytes
            result = self._read(pending.item) if pending.future is None else pending.future.result()
            if self._wanted(result):
                results.append(result)
            self._fill(max(count - len(results), self._ahead))
        if self._failure is not None and self._is_at_end and wanted and not results:
            failure, self._failure, self.is_exhausted = self._failure, None, True
            raise failure
        self.is_exhausted = self._is_at_end and self._failure is None
        return results

    def has_ready(self, count: int) -> bool:
        """Whether `take` has this many results without waiting, or all that were drawn."""
        with self._changed:
            num_ready = sum(pending.is_ready for pending in self._pending)
            return num_ready >= min(count, len(self._pending))

    def has_results(self) -> bool:
        """Whether there is a result that is wanted. Waits until one is ready, unless `stop` returns True."""
        self._first = self.take(1)
        self.is_exhausted = self.is_exhausted and not self._first
        return bool(self._first)

    def close(self, *, wait: bool = True) -> None:
        """Drop results that were not taken. May be called repeatedly. With `wait`, all threads have ended on return."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._pool.shutdown(wait=wait, cancel_futures=True)
        if self._drawer is not None and wait:
            self._drawer.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(wait=False)

    @property
    def _is_at_end(self) -> bool:
        return self._has_ended and not self._pending

    @property
    def _has_room(self) -> bool:
        if self._has_ended or len(self._pending) >= self._room:
            return False
        return self._pending_bytes < self._ahead_bytes or not self._pending

    def _fill(self, number: int) -> None:
        """Draw until `number` items are pending, or until at least one is pending and the limit of bytes is reached."""
        with self._changed:
            self._room = number
            self._changed.notify_all()
        while self._drawer is None and self._has_room:
            self._draw()

    def _draw_apart(self) -> None:
        try:
            while self._wait_for_room():
                self._draw()
        except BaseException as failure:  # of any kind: `take` must not wait for ever
            self._end(failure)
        finally:
            if isinstance(self._source, Generator):
                self._source.close()

    def _wait_for_room(self) -> bool:
        """Wait until more items may be pending; returns whether to draw another one."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_room or self._has_ended or self._is_closed)
            return not (self._has_ended or self._is_closed or self._stop())

    def _draw(self) -> None:
        try:
            item = next(self._source)
        except StopIteration:
            self._end(None)
        except Exception as failure:
            self._end(failure)
        else:
            self._add(item)

    def _end(self, failure: BaseException | None) -> None:
        with self._changed:
            self._has_ended, self._failure = True, failure
            self._changed.notify_all()

    def _add(self, item: Item) -> None:
        is_shareable, num_bytes = self._shareable(item), self._num_bytes(item)
        with self._changed:
            if self._is_closed:
                return
            future = self._pool.submit(self._read, item) if is_shareable else None
            self._pending.append(_Pending(item, future, num_bytes))
            self._pending_bytes += num_bytes
            self._changed.notify_all()
        if future is not None:
            future.add_done_callback(self._tell)

    def _tell(self, _: "Future[Result]") -> None:
        with self._changed:
            self._changed.notify_all()
