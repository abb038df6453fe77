"""How far a job is, on stderr: one line written over and over on a terminal, a line now and then elsewhere."""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from llama_adapter.app.terminal.stderr_lines import say

_TERMINAL_S, _ELSEWHERE_S = 0.2, 60.0
_WINDOW_S = 30.0  # the rate is of so much time, as the time left should be that of now
_CLEAR_LINE = "\r\x1b[K"


class Progress:
    """Shows answers and failures, their rate and the time left. Of one thread; `count` runs in its own."""

    def __init__(self, *, visible: bool, what: str = "picture", count: Callable[[], int | None] | None = None) -> None:
        """`what` an answer is to, as one word.

        `count` says how many answers there will be in all, None where nobody can know; it may take its time, and what
        it raises only means that nobody knows: who does the work meets the same, and tells.
        """
        self._is_visible, self._what = visible, what
        self._is_terminal = sys.stderr.isatty()
        self._interval_s = _TERMINAL_S if self._is_terminal else _ELSEWHERE_S
        self._started = self._shown_at = time.monotonic()
        self._seen: deque[tuple[float, int]] = deque([(self._started, 0)])
        self._is_on_line = False
        self._total: int | None = None
        if visible and count is not None:
            threading.Thread(target=self._count, args=(count,), name="count", daemon=True).start()

    def show(self, *, answered: int, failed: int, known: int) -> None:
        """Tell, if the last time is long enough ago; `known` are those of earlier runs."""
        now = time.monotonic()
        if not self._is_visible or now - self._shown_at < self._interval_s:
            return
        self._shown_at = now
        line = self.line(answered=answered, failed=failed, known=known, now=now)
        if self._is_terminal:
            say(f"{_CLEAR_LINE}{line[: _terminal_width()]}", end="")  # only a single line can be written over
        else:
            say(line)
        self._is_on_line = self._is_terminal

    def line(self, *, answered: int, failed: int, known: int, now: float) -> str:
        """What is told at a time of `time.monotonic()`."""
        done = answered + failed
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] > _WINDOW_S:
            self._seen.popleft()
        then, before = self._seen[0]
        rate = (done - before) / (now - then) if now > then else 0.0
        total = self._total
        of = "" if total is None else f" of {total:,}"
        parts = [f"{done + known:,}{of} {self._what}s", f"{rate:.2f} {self._what}s/s"]
        if total is not None and rate > 0 and total >= done + known:
            parts.append(f"{duration((total - done - known) / rate)} left")
        if known:
            parts.append(f"{known:,} by an earlier run")
        if failed:
            parts.append(f"{failed:,} failed")
        return ", ".join(parts)

    def clear(self) -> None:
        """Free the line for other talk."""
        if self._is_on_line:
            say(_CLEAR_LINE, end="")
            self._is_on_line = False

    def _count(self, count: Callable[[], int | None]) -> None:
        with suppress(Exception):
            self._total = count()


def _terminal_width() -> int | None:
    """Characters that fit beside the cursor; None where nobody knows."""
    with suppress(OSError, ValueError):
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
        return columns - 1 if columns > 1 else None
    return None


def duration(seconds: float) -> str:
    """Such as 42 s, 7 min 5 s, 3 h 20 min, 2 d 4 h."""
    whole = round(seconds)
    for size, name, smaller, smaller_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // smaller} {smaller_name}"
    return f"{whole} s"
