"""Services that run in other threads, waiting for them with a time limit, and stopping them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from llama_adapter.app.serving.online.service import Observer, Service

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


class Gate(Observer):
    """Stops the engine thread between two steps until a test lets it continue, so that no test depends on time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._steps: int | None = None  # steps that may still run; None: all
        self._has_begun = False  # whether an answer has begun since `close`
        self.num_steps = 0

    def close(self) -> None:
        """Stop the next answer after its first token. From then on every step needs `let`."""
        with self._changed:
            self._steps, self._has_begun = 0, False

    def let(self, steps: int) -> None:
        with self._changed:
            self._steps = (self._steps or 0) + steps
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._steps = None
            self._changed.notify_all()

    def first_token(self, seconds: float) -> None:
        """Called in the engine thread during a step. The step of an earlier answer may end after `close`."""
        with self._changed:
            self._has_begun = True

    def stage(self, stage: str, seconds: float) -> None:
        """Called in the engine thread after a step, once for each stage that took time."""
        if stage != "decode":
            return
        with self._changed:
            self.num_steps += 1
            self._changed.notify_all()
            if not self._has_begun:
                return
            assert self._changed.wait_for(lambda: self._steps is None or self._steps > 0, timeout=60)
            if self._steps is not None:
                self._steps -= 1
