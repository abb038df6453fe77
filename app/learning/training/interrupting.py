"""Ctrl-C and SIGTERM: the first one ends a run after its present step, a second one ends it at once.

Work that can be left out, such as scoring, ends at the first one.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from llama_adapter.app.models.parallel.errors import RankError
from llama_adapter.runtime.terminal.stderr_lines import say


class Interruption:
    """Notes whether the run was asked to end."""

    def __init__(self, *, speaks: bool = True) -> None:
        self.is_asked = False
        self._speaks, self._raises = speaks, False

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Inside this context, the first request already raises KeyboardInterrupt."""
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def ask(self) -> None:
        """Ask the run to end after its present step.

        Raises KeyboardInterrupt if this is the second request, or inside `raised`.
        """
        is_second, self.is_asked = self.is_asked, True
        if is_second or self._raises:
            raise KeyboardInterrupt
        if self._speaks:
            say("ending after this step; interrupt again to end at once")


@contextmanager
def interruptible(*, speaks: bool = True) -> Iterator[Interruption]:
    """Inside this context, the first Ctrl-C, SIGTERM or SIGHUP is noted; the second one raises KeyboardInterrupt."""
    found = Interruption(speaks=speaks)
    if threading.current_thread() is not threading.main_thread():
        yield found
        return

    def handle(number: int, frame: FrameType | None) -> None:
        found.ask()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before: dict[int, Any] = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield found
    except RankError:
        before[signal.SIGTERM] = signal.SIG_IGN  # torchrun sends it to all ranks now; the error is printed first
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
