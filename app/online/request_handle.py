"""A submitted request, as its client holds it: yields events to a thread or an event loop."""

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from llama_adapter.app.tasks.answers import Answer, Event
from llama_adapter.app.tasks.prompts import Prompt
from llama_adapter.llm.engine.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One question about one picture."""

    picture: bytes  # the file
    prompt: Prompt
    label: str = "picture"  # becomes `Answer.picture`
    sampling: SamplingParams = field(default_factory=SamplingParams)
    choices: tuple[str, ...] | None = None  # the answer is the likeliest of them
    stop: tuple[str, ...] = ()  # the answer ends before the first of these
    client: str = ""  # clients take turns
    timeout_s: float | None = None  # at most, and by default, the service's limit


class RequestHandle:
    """One request. Any thread may cancel it; a single reader consumes its events, in one of the four ways."""

    def __init__(self, request_id: int, *, cancel: Callable[["RequestHandle"], None]) -> None:
        self.id = request_id
        self.submitted = time.perf_counter()
        self.is_cancelled = False
        self._cancel = cancel
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._listener: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._is_text_wanted = True

    def cancel(self) -> None:
        """Cancel: the last event is then an answer with the error `cancelled` and the text so far. May be repeated."""
        self.is_cancelled = True
        self._cancel(self)

    def events(self) -> Iterator[Event]:
        """Text deltas and finally the answer; blocks."""
        while True:
            event = self._events.get()
            yield event
            if isinstance(event, Answer):
                return

    def result(self) -> Answer:
        """The answer; blocks."""
        return next(event for event in self.events() if isinstance(event, Answer))

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Like `events`, for an event loop."""
        woken = asyncio.Event()
        self._listener = asyncio.get_running_loop(), woken
        while True:
            woken.clear()  # first, so that no later event is missed
            while True:
                try:
                    event = self._events.get_nowait()
                except queue.Empty:
                    break
                yield event
                if isinstance(event, Answer):
                    return
            await woken.wait()

    async def answer(self) -> Answer:
        """Like `result`, for an event loop, which is woken only once."""
        self._is_text_wanted = False
        async for event in self:
            if isinstance(event, Answer):
                return event
        raise AssertionError("the last event is an answer")

    def deliver(self, event: Event) -> None:
        """Pass an event to the reader; for the service."""
        self._events.put(event)
        if self._listener is not None and (self._is_text_wanted or isinstance(event, Answer)):
            loop, woken = self._listener
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(woken.set)
