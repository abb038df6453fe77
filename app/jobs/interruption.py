"""Ctrl-C, SIGTERM and SIGHUP during a job: the first one finishes the pictures that are begun, the second one stops."""

import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """Handles signals as a context manager; `requested` is set by the first one."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # Only the main thread can set handlers. Ignored signals stay ignored, as under nohup.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        for heard in self._previous:
            signal.signal(heard, signal.default_int_handler)
        with suppress(OSError):  # print is not reentrant
            os.write(2, b"\nfinishing the pictures that are begun; Ctrl-C again stops at once\n")
