"""Services that run in other threads, and waiting for them with a time limit."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from llama_adapter.app.serving.online.service import Service

WAIT_S = 30.0
S = TypeVar("S", bound=Service)


@contextmanager
def started(service: S) -> Iterator[S]:
    """Start a service and wait until it is ready; close it at the end."""
    try:
        service.start()
        service.wait_until_ready(2 * WAIT_S)
        yield service
    finally:
        service.close()


def wait_for(condition: Callable[[], Any]) -> None:
    """Poll until the condition holds, for actions of other threads that give no notification."""
    waited = threading.Event()
    for _ in range(int(WAIT_S / 0.005)):
        if condition():
            return
        waited.wait(0.005)
    raise AssertionError("it did not come")
