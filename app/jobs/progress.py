"""Progress on stderr: on a terminal, one line that is rewritten; otherwise, a line per minute."""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from llama_adapter.runtime.terminal.stderr_lines import can_overwrite_lines, say

_TERMINAL_S, _ELSEWHERE_S = 0.2, 60.0
_WINDOW_S = 30.0  # the rate is measured over the last 30 s
_CLEAR_LINE = "\r\x1b[K"


class StatusLine:
    """One line, shown from time to time; on a terminal the next one replaces it. Not thread-safe."""

    def __init__(self, *, visible: bool, terminal_s: float, elsewhere_s: float) -> None:
        """It is shown at most every `terminal_s` seconds on a terminal, and every `elsewhere_s` seconds elsewhere."""
        self._is_visible, self._is_terminal = visible, can_overwrite_lines()
        self._interval_s = terminal_s if self._is_terminal else elsewhere_s
        self._shown_at, self._is_on_line = time.monotonic(), False

    def _is_due(self, now: float) -> bool:
        """Whether a line is to be shown now, a time of `time.monotonic()`."""
        if not self._is_visible or now - self._shown_at < self._interval_s:
            return False
        self._shown_at = now
        return True

    def _put(self, line: str) -> None:
        if self._is_terminal:
            say(f"{_CLEAR_LINE}{line[: _terminal_width()]}", end="")  # only a single line can be overwritten
        else:
            say(line)
        self._is_on_line = self._is_terminal

    def clear(self) -> None:
        """Erase the line before something else is printed."""
        if self._is_on_line:
            say(_CLEAR_LINE, end="")
            self._is_on_line = False


class Progress(StatusLine):
    """Shows answers and failures, their rate and the time left. Not thread-safe."""

    def __init__(self, *, visible: bool, what: str = "picture", count: Callable[[], int | None] | None = None) -> None:
        """`what` is one word for what an answer is about. `count` returns the number of all answers, None if unknown.

        `count` runs in its own thread. Its errors are ignored: the job meets and reports the same ones.
        """
        super().__init__(visible=visible, terminal_s=_TERMINAL_S, elsewhere_s=_ELSEWHERE_S)
        self._what, self._started = what, self._shown_at
        self._seen: deque[tuple[float, int]] = deque([(self._started, 0)])
        self._total: int | None = None
        if visible and count is not None:
            threading.Thread(target=self._count, args=(count,), name="count", daemon=True).start()

    def show(self, *, answered: int, failed: int, known: int) -> None:
        """Print the line, at most every 0.2 s (terminal) or 60 s; `known` counts answers of earlier runs."""
        now = time.monotonic()
        if self._is_due(now):
            self._put(self.line(answered=answered, failed=failed, known=known, now=now))

    def line(self, *, answered: int, failed: int, known: int, now: float) -> str:
        """The line at `now`, a time of `time.monotonic()`."""
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

    def _count(self, count: Callable[[], int | None]) -> None:
        with suppress(Exception):
            self._total = count()


def _terminal_width() -> int | None:
    """Characters that fit on a line; None if unknown."""
    with suppress(OSError, ValueError):
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
        return columns - 1 if columns > 1 else None
    return None


def duration(seconds: float) -> str:
    """Format a duration: 42 s, 7 min 5 s, 3 h 20 min or 2 d 4 h."""
    whole = round(seconds)
    for size, name, smaller, smaller_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // smaller} {smaller_name}"
    return f"{whole} s"
