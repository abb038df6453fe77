"""Pictures are read and resized in threads, ahead of the device that encodes them."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Generic, NamedTuple, Self, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# Decoding and resizing leave Python's lock alone, so that threads help; more of them than this only fill memory.
MAX_THREADS = 4
MAX_AHEAD_BYTES = 512 * 2**20
_PATIENCE_S = 1.0  # for a whole batch, while nothing else is under way
_LOOK_S = 0.1  # so often, somebody who waits for a picture looks whether it is to stop


def num_reading_threads() -> int:
    """Threads that read pictures on this machine."""
    return min(MAX_THREADS, os.cpu_count() or 1)


class _Pending(NamedTuple, Generic[Result]):
    future: "Future[Result]"
    num_bytes: int


class ReadAhead(Generic[Item, Result]):
    """Applies `read` to the items of `source` in threads, up to `ahead` of them before they are asked for.

    Fewer, where what `num_bytes` says of them adds up to `ahead_bytes`: items that carry pictures' bytes with them.
    Items are drawn from `source` in the caller's thread; those that are not `shareable` are read there too. What `read`
    raises comes up in `take`. Left as a context, it waits for no `read` that is under way, which may hang: who wants no
    more of its results closes what it reads by.
    """

    def __init__(
        self,
        source: Iterator[Item],
        read: Callable[[Item], Result],
        *,
        ahead: int,
        shareable: Callable[[Item], bool] = lambda item: True,
        num_bytes: Callable[[Item], int] = lambda item: 0,
        ahead_bytes: int = MAX_AHEAD_BYTES,
        num_threads: int | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._source, self._read, self._ahead, self._shareable = source, read, ahead, shareable
        self._num_bytes, self._ahead_bytes, self._stop = num_bytes, ahead_bytes, stop
        self._pending: list[_Pending[Result]] = []  # in the order they were drawn
        self._pending_bytes = 0
        self._has_ended = False  # the source
        self._pool = ThreadPoolExecutor(num_threads or num_reading_threads(), thread_name_prefix="read")

    @property
    def is_exhausted(self) -> bool:
        """Whether everything was taken; known after the first `take`."""
        return self._has_ended and not self._pending

    def take(self, count: int, *, at_least: int | None = None) -> list[Result]:
        """Up to `count` results that are ready, the oldest first; one that takes long holds no other back.

        Waits until there are `at_least` (default: `count`), or until there are no more: `is_exhausted` tells. After a
        second one is enough, as a picture that hangs at the end of a job should keep nothing from being answered. Once
        `stop` says so, it waits no more.
        """
        results: list[Result] = []
        wanted, patient_until = count if at_least is None else at_least, time.monotonic() + _PATIENCE_S
        self._fill(max(count, self._ahead))
        while len(results) < count and self._pending:
            ready = next((place for place, pending in enumerate(self._pending) if pending.future.done()), None)
            if ready is not None:
                results.append(self._pop(ready).result())
                self._fill(max(count - len(results), self._ahead))
            elif len(results) < (wanted if time.monotonic() < patient_until else min(wanted, 1)) and not self._stop():
                wait([pending.future for pending in self._pending], timeout=_LOOK_S, return_when=FIRST_COMPLETED)
            else:
                break
        return results

    def close(self, *, wait: bool = True) -> None:
        """Let go of what was not taken; harmless when repeated. With `wait`, no thread is left."""
        self._pool.shutdown(wait=wait, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(wait=False)

    def _pop(self, place: int) -> "Future[Result]":
        pending = self._pending.pop(place)
        self._pending_bytes -= pending.num_bytes
        return pending.future

    def _fill(self, number: int) -> None:
        """Draw until so many are pending, or hold too many bytes; but at least one."""
        while len(self._pending) < number and (self._pending_bytes < self._ahead_bytes or not self._pending):
            try:
                item = next(self._source)
            except StopIteration:
                self._has_ended = True
                return
            num_bytes = self._num_bytes(item)
            future = self._pool.submit(self._read, item) if self._shareable(item) else self._done(item)
            self._pending.append(_Pending(future, num_bytes))
            self._pending_bytes += num_bytes

    def _done(self, item: Item) -> "Future[Result]":
        future: Future[Result] = Future()
        try:
            future.set_result(self._read(item))
        except BaseException as error:
            future.set_exception(error)
        return future
