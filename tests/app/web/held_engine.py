"""An engine that stands still between two of its steps until a test lets it go on: no test has to wait for a clock."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llama_adapter.app.captioning.caption_loop import CaptionLoop
from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.stage_clock import StageClock
from llama_adapter.app.tasks.answers import Answer, Event


class HeldEngine:
    """Holds the engine between two steps, once so many answers have come out of it."""

    def __init__(self, *, hold_after: int) -> None:
        self._changed = threading.Condition()
        self._hold_after: float = hold_after
        self._num_answers = 0
        self.is_held = threading.Event()

    def load(self) -> Captioner:
        """A captioner whose steps wait at the gate."""
        captioner = Captioner.load()
        open_loop = captioner.open_loop

        @contextmanager
        def open_held_flow(clock: StageClock) -> Iterator[CaptionLoop]:
            with open_loop(clock) as loop:
                step = loop.step
                loop.step = lambda: self._pass(step)  # type: ignore[method-assign]
                yield loop

        captioner.open_loop = open_held_flow  # type: ignore[method-assign, assignment]
        return captioner

    def let(self, answers: float) -> None:
        """Go on until there are so many answers in all."""
        with self._changed:
            self._hold_after = answers
            self._changed.notify_all()

    def open(self) -> None:
        """From now on nothing waits."""
        self.let(math.inf)

    def _pass(self, step: Callable[[], list[Event]]) -> list[Event]:
        with self._changed:
            if self._num_answers >= self._hold_after:
                self.is_held.set()
                assert self._changed.wait_for(lambda: self._num_answers < self._hold_after, timeout=60)
        events = step()
        self._num_answers += sum(isinstance(event, Answer) for event in events)
        return events
