"""Ctrl-C and SIGTERM ask a run to end after its present step; a second one ends it at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from llama_adapter.app.parallel.errors import RankError
from llama_adapter.app.terminal.stderr_lines import say


class Interruption:
    """Whether somebody has asked the run to end."""

    def __init__(self) -> None:
        self.is_asked = False

    def ask(self) -> None:
        """Ask the run to end after its present step."""
        self.is_asked = True


@contextmanager
def interruptible(*, speaks: bool = True) -> Iterator[Interruption]:
    """Inside, the first Ctrl-C, SIGTERM or SIGHUP is noted; a second one raises KeyboardInterrupt."""
    found = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield found
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if found.is_asked:
            raise KeyboardInterrupt
        found.ask()
        if speaks:
            say("ending after this step; a second time ends at once")

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before: dict[int, Any] = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield found
    except RankError:
        before[signal.SIGTERM] = signal.SIG_IGN  # torchrun ends all ranks, and this one has to say why first
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
