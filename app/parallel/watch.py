"""Watches the other ranks: whether they beat, and whether a step of all of them goes on."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from llama_adapter.app.parallel.errors import RankError
from llama_adapter.app.parallel.rendezvous import BEAT_S, beat_key
from llama_adapter.app.terminal.run_guarded import format_problem
from llama_adapter.app.terminal.stderr_lines import say
from llama_adapter.runtime.problems import describe

MISSED_BEATS: Final = 8
FEW_BEATS: Final = 2  # where something else shows already that a rank is missing
_POLL_S: Final = 0.25
_RELEASE_S: Final = 10.0  # for the device to give up its wait

Failure = tuple[int, str, str]  # rank, sentence, hint


class BeatWatch:
    """Finds ranks whose beats have stopped."""

    def __init__(self, store: Any, *, may_have_ended: bool) -> None:
        """`may_have_ended` says that a rank can end without a word, because it is not a child of this process."""
        self._store = store
        self._what = "it has ended, is stopped or hangs" if may_have_ended else "it is stopped or hangs"
        self._last: dict[int, tuple[bytes, float]] = {}

    def silent(self, ranks: set[int], *, beats: float = MISSED_BEATS) -> Failure | None:
        """One without a beat for some seconds; None if all have one, or none yet."""
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
    """Ends this rank's wait for its device when another rank has failed, where the device itself would wait for ever.

    A thread of its own looks at the others while this rank is inside `watching`. When one has failed, or nothing
    goes on for too long, it tells the device to give up. What the device gives then is worthless, so
    `watching` raises in any case. If the device does not give up, the process ends, with the same words and exit code.
    """

    def __init__(
        self,
        *,
        find: Callable[[float], RankError | None],
        progress: Callable[[], int],
        release: Callable[[], None],
    ) -> None:
        """`find` looks for a rank that has failed; its argument is for how many seconds nothing has gone on.

        `progress` changes while work goes on, and `release` makes the device give up.
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
        """Raises RankError for a failure of another rank, whatever the body gives or raises."""
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
        """End the thread, and wait for it."""
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
        self._found = found  # before the wait can end
        releaser = threading.Thread(target=self._try_release, name="release", daemon=True)
        releaser.start()
        if not self._outside.wait(_RELEASE_S):
            problem = describe(found)
            say(format_problem(problem))
            os._exit(problem.exit_code)
        releaser.join(_RELEASE_S)

    def _try_release(self) -> None:
        with suppress(Exception):  # the library's own; the process ends then
            self._release()
