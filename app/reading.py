"""Pictures are read and resized in threads, in the order they come, ahead of the device that encodes them."""

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# Decoding and resizing leave Python's lock alone, so that threads help; more of them than this only fill memory.
MAX_THREADS = 4


def num_reading_threads() -> int:
    """Threads that read pictures on this machine."""
    return min(MAX_THREADS, os.cpu_count() or 1)


class ReadAhead(Generic[Item, Result]):
    """Applies `read` to the items of `source` in threads, up to `ahead` of them before they are asked for.

    Items are drawn from `source` in the caller's thread; those that are not `shareable` are read there too. What `read`
    raises comes up in `take`.
    """

    def __init__(
        self,
        source: Iterator[Item],
        read: Callable[[Item], Result],
        *,
        ahead: int,
        shareable: Callable[[Item], bool] = lambda item: True,
    ) -> None:
        self._source, self._read, self._ahead, self._shareable = source, read, ahead, shareable
        self._pending: deque[Future[Result]] = deque()
        self._pool = ThreadPoolExecutor(num_reading_threads(), thread_name_prefix="read")

    def take(self, count: int) -> list[Result]:
        """The next results in order, `count` of them; fewer mean that there are no more."""
        self._fill(max(count, self._ahead))
        results = [self._pending.popleft().result() for _ in range(min(count, len(self._pending)))]
        self._fill(self._ahead)
        return results

    def close(self) -> None:
        """Let go of what was not taken; harmless when repeated."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self, number: int) -> None:
        for item in itertools.islice(self._source, max(0, number - len(self._pending))):
            self._pending.append(self._pool.submit(self._read, item) if self._shareable(item) else self._done(item))

    def _done(self, item: Item) -> "Future[Result]":
        future: Future[Result] = Future()
        try:
            future.set_result(self._read(item))
        except BaseException as error:
            future.set_exception(error)
        return future
