"""A client's request, and the handle through which a thread or an event loop receives its events."""

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from llama_adapter.app.captioning.tasks.answers import Answer, Event
from llama_adapter.app.captioning.tasks.prompts import Prompt
from llama_adapter.app.captioning.tasks.task import FREE_TEXT, Task
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.prefix import TextPrefix


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One question about one picture, or one prompt without a picture."""

    picture: bytes | None  # content of a picture file; None: no picture
    others: tuple[bytes, ...] = ()  # further pictures of the same prompt
    prompt: Prompt
    text_prefix: TextPrefix | None = None  # used without a picture; None: as in the model's training
    label: str = "picture"  # copied to `Answer.picture`
    sampling: SamplingParams = field(default_factory=SamplingParams)
    task: Task = FREE_TEXT
    stop: tuple[str, ...] = ()  # the text ends before the first of these strings
    least_room: int = 0  # tokens of the context that the prompt must leave for the answer
    client: str = ""  # name of the client, for taking turns
    timeout_s: float | None = None  # capped at the service's limit; None: that limit
    is_background: bool = False  # yields to other requests; its time limit counts from its admission
    num_logprobs: int | None = None  # see `GenerateRequest`
    with_pieces: bool = True  # whether the reader uses pieces of text; False: only the answer

    @property
    def num_bytes(self) -> int:
        """Size of the picture files; 0 without a picture."""
        return sum(map(len, self.pictures))

    @property
    def pictures(self) -> tuple[bytes, ...]:
        """The content of all picture files."""
        return () if self.picture is None else (self.picture, *self.others)


class RequestHandle:
    """One request. Any thread may cancel it. A single reader takes its events, through one of the five methods."""

    def __init__(self, request_id: int, *, cancel: Callable[["RequestHandle"], None]) -> None:
        self.id = request_id
        self.submitted = time.perf_counter()
        self.is_cancelled = False
        self._cancel = cancel
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._listener: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._is_text_wanted = True

    def cancel(self) -> None:
        """Cancel the request: its last event is an answer with error `cancelled` and the text so far.

        May be called repeatedly, and after the answer.
        """
        self.is_cancelled = True
        self._cancel(self)

    def events(self) -> Iterator[Event]:
        """Yield pieces of text, and the answer at the end. Blocks."""
        while True:
            event = self._events.get()
            yield event
            if isinstance(event, Answer):
                return

    def result(self) -> Answer:
        """Wait for the answer and return it. Blocks."""
        return next(event for event in self.events() if isinstance(event, Answer))

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Like `events`, for an event loop."""
        async for group in self.groups():
            for event in group:
                yield event

    async def groups(self, *, pause_s: float = 0.0) -> AsyncIterator[list[Event]]:
        """Like `events`, for an event loop. Yields groups: all events since the last group, at least one.

        Text that arrives within `pause_s` seconds after a group is held for the next group. The answer is not held.
        """
        woken = asyncio.Event()
        self._listener = asyncio.get_running_loop(), woken
        while True:
            woken.clear()  # before reading the queue, so that a later event sets it again
            group: list[Event] = []
            with suppress(queue.Empty):
                while True:
                    group.append(self._events.get_nowait())
            if group:
                yield group
                if isinstance(group[-1], Answer):
                    return
                if pause_s:
                    self._is_text_wanted = False
                    with suppress(TimeoutError):
                        await asyncio.wait_for(woken.wait(), pause_s)
                    self._is_text_wanted = True
                    continue
            await woken.wait()

    async def answer(self) -> Answer:
        """As `result`, without blocking the event loop. Pieces of text do not wake the event loop."""
        self._is_text_wanted = False
        async for event in self:
            if isinstance(event, Answer):
                return event
        raise AssertionError("the last event is an answer")

    def deliver(self, event: Event) -> None:
        """Pass an event to the reader; called by the service."""
        self._events.put(event)
        if self._listener is not None and (self._is_text_wanted or isinstance(event, Answer)):
            loop, woken = self._listener
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(woken.set)
