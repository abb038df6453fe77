"""One line about a run on stderr: rewritten in place on a terminal, printed from time to time elsewhere."""

import os
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Final

from llama_adapter.app.jobs.progress import duration
from llama_adapter.runtime.terminal.stderr_lines import can_overwrite_lines, say

_TERMINAL_S, _ELSEWHERE_S = 0.5, 30.0
_WINDOW: Final = 50  # the rate is measured over this many steps
_SMOOTH: Final = 0.95
_CLEAR_LINE: Final = "\r\x1b[K"


class TrainProgress:
    """Shows step, loss, learning rate, examples per second and the time left."""

    def __init__(self, *, visible: bool, num_steps: int) -> None:
        self._is_visible, self._num_steps = visible, num_steps
        self._is_terminal = can_overwrite_lines()
        self._shown_at, self._is_on_line = time.monotonic(), False
        self._seen: deque[tuple[float, int]] = deque([(time.monotonic(), 0)], maxlen=_WINDOW)
        self._count, self._loss = 0, float("nan")

    @property
    def rate(self) -> float:
        """Examples per second over the last steps, without evaluations."""
        (first, before), (last, count) = self._seen[0], self._seen[-1]
        return (count - before) / (last - first) if last > first else 0.0

    @property
    def seconds(self) -> float:
        """Duration of the last step."""
        return self._seen[-1][0] - self._seen[-2][0] if len(self._seen) > 1 else 0.0

    def resume(self) -> None:
        """Restart the measurement, so that time spent on other work since the last step does not count."""
        self._seen.clear()
        self._seen.append((time.monotonic(), self._count))

    def step(self, done: int, *, loss: float, lr: float, num_examples: int) -> None:
        """Count a step; prints the line from time to time."""
        now = time.monotonic()
        self._count += num_examples
        self._seen.append((now, self._count))
        if loss == loss:
            self._loss = loss if self._loss != self._loss else _SMOOTH * self._loss + (1 - _SMOOTH) * loss
        if self._is_visible and now - self._shown_at >= (_TERMINAL_S if self._is_terminal else _ELSEWHERE_S):
            self._shown_at = now
            self._show(self.line(done, lr=lr, num_examples=num_examples))

    def line(self, done: int, *, lr: float, num_examples: int) -> str:
        """The line after a step."""
        parts = [f"step {done:,} of {self._num_steps:,}", f"loss {self._loss:.4f}", f"lr {lr:.2e}"]
        if self.rate > 0:
            left = (self._num_steps - done) * num_examples / self.rate
            parts += [f"{self.rate:.1f} examples/s", f"{duration(left)} left"]
        return ", ".join(parts)

    def _show(self, line: str) -> None:
        """Print a line. On a terminal, the next line replaces it."""
        if self._is_terminal:
            say(f"{_CLEAR_LINE}{line[: _width()]}", end="")
            self._is_on_line = True
        else:
            say(line)

    def say(self, line: str) -> None:
        """Print a line that is not replaced."""
        self.clear()
        if self._is_visible:
            say(line)

    def clear(self) -> None:
        """Erase the line before something else is printed."""
        if self._is_on_line:
            say(_CLEAR_LINE, end="")
            self._is_on_line = False


def _width() -> int | None:
    with suppress(OSError, ValueError):
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
        return columns - 1 if columns > 1 else None
    return None
