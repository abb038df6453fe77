"""Ctrl-C, SIGTERM and SIGHUP: the first one asks a run to end, the second one ends it at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from llama_adapter.app.models.parallel.errors import RankError


class Interruption:
    """Notes whether a run was asked to end."""

    def __init__(self, note: str) -> None:
        """`note` is printed on stderr when the run is asked to end; "": nothing is printed."""
        self.is_asked = False
        self._note, self._raises = note, False

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Inside this context, the first request already raises KeyboardInterrupt."""
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def ask(self) -> None:
        """Ask the run to end. Raises KeyboardInterrupt if this is the second request, or inside `raised`."""
        is_second, self.is_asked = self.is_asked, True
        if is_second or self._raises:
            raise KeyboardInterrupt
        if self._note:
            with suppress(OSError):  # print is not reentrant
                os.write(2, f"\n{self._note}\n".encode())


@contextmanager
def interruptible(note: str) -> Iterator[Interruption]:
    """Inside this context, the first Ctrl-C, SIGTERM or SIGHUP is noted; the second one raises KeyboardInterrupt."""
    found, previous = Interruption(note), dict[signal.Signals, Any]()

    def handle(number: int, frame: FrameType | None) -> None:
        found.ask()

    # Only the main thread can set handlers. Ignored signals stay ignored, as under nohup.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, handle)
    try:
        yield found
    except RankError:
        # torchrun sends it to all ranks now; the error is printed first.
        if signal.SIGTERM in previous and "TORCHELASTIC_RUN_ID" in os.environ:
            previous[signal.SIGTERM] = signal.SIG_IGN
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
