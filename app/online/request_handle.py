"""A request under way, as its client holds it: events come out, in a thread or in an event loop."""

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field

from llama_adapter.app.tasks.answers import Answer, Event
from llama_adapter.app.tasks.choose import choosing
from llama_adapter.app.tasks.prompts import Prompt
from llama_adapter.app.tasks.task import FREE_TEXT, Task
from llama_adapter.llm.engine.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One question about one picture."""

    picture: bytes  # of a picture file
    prompt: Prompt
    label: str = "picture"  # becomes `Answer.picture`
    sampling: SamplingParams = field(default_factory=SamplingParams)
    task: Task = FREE_TEXT
    stop: tuple[str, ...] = ()  # the text ends before the first of these
    client: str = ""  # requests of different clients take turns
    timeout_s: float | None = None  # at most the service's own limit; None: that limit
    choices: InitVar[Sequence[str] | None] = None  # short for `task=choosing(choices)`

    def __post_init__(self, choices: Sequence[str] | None) -> None:
        if choices is not None:
            object.__setattr__(self, "task", choosing(choices))


class RequestHandle:
    """One request. Any thread may cancel it; one reader takes its events, by one of the four ways."""

    def __init__(self, request_id: int, *, cancel: Callable[["RequestHandle"], None]) -> None:
        self.id = request_id
        self.submitted = time.perf_counter()
        self.is_cancelled = False
        self._cancel = cancel
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._listener: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._is_text_wanted = True

    def cancel(self) -> None:
        """Ask for the end: the last event is then an answer with error `cancelled` and the text until then.

        Harmless when repeated or late.
        """
        self.is_cancelled = True
        self._cancel(self)

    def events(self) -> Iterator[Event]:
        """Text as it comes, and the answer at the end; blocks."""
        while True:
            event = self._events.get()
            yield event
            if isinstance(event, Answer):
                return

    def result(self) -> Answer:
        """The answer; blocks."""
        return next(event for event in self.events() if isinstance(event, Answer))

    async def __aiter__(self) -> AsyncIterator[Event]:
        """As `events`, without blocking the event loop."""
        woken = asyncio.Event()
        self._listener = asyncio.get_running_loop(), woken
        while True:
            woken.clear()  # before looking: what comes after the last look wakes
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
        """As `result`, without blocking the event loop, which is woken only once."""
        self._is_text_wanted = False
        async for event in self:
            if isinstance(event, Answer):
                return event
        raise AssertionError("the last event is an answer")

    def deliver(self, event: Event) -> None:
        """Hand an event to whoever reads; for the service."""
        self._events.put(event)
        if self._listener is not None and (self._is_text_wanted or isinstance(event, Answer)):
            loop, woken = self._listener
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                loop.call_soon_threadsafe(woken.set)
