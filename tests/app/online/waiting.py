"""Waiting for other threads in tests, with an end."""

import threading
from collections.abc import Callable
from typing import Any

WAIT_S = 30.0


def wait_for(condition: Callable[[], Any]) -> None:
    """Poll until the condition holds, for what other threads are about to do and give no notice of."""
    waited = threading.Event()
    for _ in range(int(WAIT_S / 0.005)):
        if condition():
            return
        waited.wait(0.005)
    raise AssertionError("it did not come")
