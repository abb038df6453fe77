"""Watches the other ranks: whether they send heartbeats, and whether a step of all ranks makes progress."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from llama_adapter.app.models.parallel.errors import RankError
from llama_adapter.app.models.parallel.rendezvous import BEAT_S, beat_key
from llama_adapter.runtime.problems import describe
from llama_adapter.runtime.terminal.run_guarded import format_problem
from llama_adapter.runtime.terminal.stderr_lines import say

MISSED_BEATS: Final = 8
FEW_BEATS: Final = 2  # enough missed beats if something else has already failed
_POLL_S: Final = 0.25
_RELEASE_S: Final = 10.0  # time for the device to end its wait

Failure = tuple[int, str, str]  # rank, sentence, hint


class BeatWatch:
    """Finds ranks whose heartbeats have stopped."""

    def __init__(self, store: Any, *, may_have_ended: bool) -> None:
        """`may_have_ended`: ranks are not children of this process, so one of them can end without notice."""
        self._store = store
        self._what = "it has ended, is stopped or hangs" if may_have_ended else "it is stopped or hangs"
        self._last: dict[int, tuple[bytes, float]] = {}

    def silent(self, ranks: set[int], *, beats: float = MISSED_BEATS) -> Failure | None:
        """A rank whose last heartbeat is more than `beats` intervals old; None if there is none.

        Ranks that have not sent a heartbeat yet are ignored.
        """
        now = time.monotonic()
        found: Failure | None = None
        for rank in sorted(ranks):
            if not self._store.check([beat_key(rank)]):
                continue
            beat = self._store.get(beat_key(rank))
            if self._last.get(rank, (b"", 0.0))[0] != beat:
                self._last[rank] = beat, now
            elif found is None and now - self._last[rank][1] > beats * BEAT_S:
                found = rank, f"it does not respond: {self._what}", "see what it does, or start again"
        return found


class StepWatch:
    """Ends this rank's wait for its device if another rank has failed and the device itself would wait forever.

    A thread watches the other ranks while this rank is inside `watching`. If one has failed, or there is no progress
    for too long, the thread aborts the device's collectives. The device's results are then invalid, so `watching`
    raises the error. If the device does not end its wait, the process ends with the same message and exit code.
    """

    def __init__(
        self,
        *,
        find: Callable[[float], RankError | None],
        progress: Callable[[], int],
        release: Callable[[], None],
    ) -> None:
        """`find` returns the error of a failed rank, or None. Its argument is the time without progress, in seconds.

        The value of `progress` changes while work goes on. `release` makes the device end its wait.
        """
        self._find, self._progress, self._release = find, progress, release
        self._found: RankError | None = None
        self._num_entered = 0
        self._is_inside, self._is_closed = False, threading.Event()
        self._outside = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="step watch", daemon=True)
        self._thread.start()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """If another rank fails inside this context, raises its RankError, even if the body raises nothing."""
        self._outside.clear()
        self._num_entered += 1
        self._is_inside = True
        try:
            yield
        except Exception:
            if self._found is None:
                raise
        finally:
            self._is_inside = False
            self._outside.set()
        if self._found is not None:
            raise self._found

    def close(self) -> None:
        """End the thread and wait for it."""
        self._is_closed.set()
        self._thread.join(_RELEASE_S)

    def _watch(self) -> None:
        last, since = (0, 0), 0.0
        while not self._is_closed.wait(_POLL_S):
            now, current = time.monotonic(), (self._num_entered, self._progress())
            if current != last or not self._is_inside:
                last, since = current, now
            if not self._is_inside:
                continue
            found = self._find(now - since)
            if found is not None and self._is_inside:
                self._end_wait(found)
                return

    def _end_wait(self, found: RankError) -> None:
        self._found = found  # set before the wait can end
        releaser = threading.Thread(target=self._try_release, name="release", daemon=True)
        releaser.start()
        if not self._outside.wait(_RELEASE_S):
            problem = describe(found)
            say(format_problem(problem))
            os._exit(problem.exit_code)
        releaser.join(_RELEASE_S)

    def _try_release(self) -> None:
        with suppress(Exception):  # any error of the library; the process then ends
            self._release()
