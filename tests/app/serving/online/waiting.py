"""Waiting for other threads in tests, with a time limit."""

import threading
from collections.abc import Callable
from typing import Any

WAIT_S = 30.0


def wait_for(condition: Callable[[], Any]) -> None:
    """Poll until the condition holds, for actions of other threads that give no notification."""
    waited = threading.Event()
    for _ in range(int(WAIT_S / 0.005)):
        if condition():
            return
        waited.wait(0.005)
    raise AssertionError("it did not come")
