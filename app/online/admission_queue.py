"""Accepted requests that are not in the engine yet: their pictures are read, then they wait for a slot.

Not thread-safe: the service guards it with its lock.
"""

import time
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

from llama_adapter.app.captioning.active_request import ActiveRequest
from llama_adapter.app.captioning.encoded_pictures import EncodedPicture
from llama_adapter.app.online.fair_queue import FairQueue
from llama_adapter.app.online.reading_pool import ReadingTask
from llama_adapter.app.online.request_handle import Ask, RequestHandle
from llama_adapter.app.online.types import BusyError, ServiceLimits
from llama_adapter.app.reading.reader import PictureReading
from llama_adapter.app.tasks.prompts import EncodedPrompt

_MAX_RETRY_AFTER_S = 60.0


@dataclass(eq=False, slots=True)
class Entry:
    """A request inside the service."""

    ask: Ask
    handle: RequestHandle
    prompt: EncodedPrompt
    deadline: float  # by `time.perf_counter()`
    task: ReadingTask | None = None  # set when reading starts
    reading: PictureReading | None = None  # set when reading ends
    conversation: ActiveRequest | None = None  # set at admission
    has_text: bool = False
    is_done: bool = False

    def converse(self) -> ActiveRequest:
        """The request as the engine's loop takes it; times count from `submit`."""
        read_ms = 0.0 if self.reading is None else self.reading.elapsed_ms
        waited_ms = (time.perf_counter() - self.handle.submitted) * 1e3 - read_ms
        return ActiveRequest(
            index=self.handle.id,
            picture=self.ask.label,
            digest="" if self.reading is None else self.reading.digest,
            prompt=self.prompt,
            sampling=self.ask.sampling,
            choices=self.ask.choices,
            stop=self.ask.stop,
            started=self.handle.submitted,
            ms={"queue": max(0.0, waited_ms), "read": read_ms},
        )

    def admit(self) -> "Admitted":
        """Hand the request to the engine."""
        assert self.reading is not None, "pictures are read before requests are admitted"
        self.conversation = self.converse()
        return Admitted(entry=self, reading=self.reading, conversation=self.conversation)


@dataclass(eq=False, kw_only=True, slots=True)
class Admitted:
    """A request in the engine."""

    entry: Entry
    reading: PictureReading
    conversation: ActiveRequest
    encoded: EncodedPicture | None = None  # if the picture is already encoded
    request_id: int = -1  # in the loop; set when submitted to it

    @property
    def pixels(self) -> np.ndarray:
        """A picture that was read and is not encoded yet: uint8 (size, size, 3)."""
        assert self.reading.pixels is not None
        return self.reading.pixels


class AdmissionQueue:
    """Gives clients turns at the engine, and refuses requests above the limits."""

    def __init__(self, limits: ServiceLimits) -> None:
        self._limits = limits
        self._ready: FairQueue[Entry] = FairQueue()
        self._entries: set[Entry] = set()
        self._num_of: Counter[str] = Counter()
        self._num_bytes = 0
        self._finish_times: deque[float] = deque(maxlen=64)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def has_ready(self) -> bool:
        """Whether a request is ready for the engine."""
        return len(self._ready) > 0

    def check(self, client: str, num_bytes: int, *, num_slow: int = 0) -> None:
        """Raise BusyError if the queue is full. `num_slow` waiting requests count against a limit of their own."""
        limits, num_waiting = self._limits, len(self) - num_slow
        if self._num_of[client] >= limits.max_waiting_per_client:
            raise BusyError(
                f"{self._num_of[client]} requests of this client are waiting, the limit per client",
                hint="wait for answers before sending more",
                retry_after_s=self._retry_after(),
            )
        if num_waiting >= limits.max_waiting or (self and self._num_bytes + num_bytes > limits.max_waiting_bytes):
            raise BusyError(
                f"The queue is full: {len(self)} requests with {self._num_bytes / 2**20:.0f} MiB of pictures",
                hint="ask again later",
                retry_after_s=self._retry_after(),
            )

    def add(self, entry: Entry) -> None:
        """Add a request whose picture is to be read, or read again after it was dropped from the cache."""
        self._entries.add(entry)
        self._num_of[entry.ask.client] += 1
        self._num_bytes += len(entry.ask.picture)

    def make_ready(self, entry: Entry) -> None:
        """Mark a request whose picture is read; no effect if it was removed."""
        if entry in self._entries:
            self._ready.put(entry, owner=entry.ask.client)

    def take_ready(self, count: int) -> list[Entry]:
        """Remove and return up to `count` requests for the engine."""
        taken: list[Entry] = []
        while len(taken) < count and (entry := self._ready.take()) is not None:
            self._leave(entry)
            taken.append(entry)
        return taken

    def remove(self, entry: Entry) -> bool:
        """Remove a request; returns whether it was here."""
        if entry not in self._entries:
            return False
        self._ready.remove(entry, owner=entry.ask.client)
        self._leave(entry)
        return True

    def note_finish(self, now: float) -> None:
        """Note that a request was answered at `now`; the retry time is estimated from this."""
        self._finish_times.append(now)

    def _leave(self, entry: Entry) -> None:
        self._entries.discard(entry)
        self._num_bytes -= len(entry.ask.picture)
        self._num_of[entry.ask.client] -= 1
        if not self._num_of[entry.ask.client]:
            del self._num_of[entry.ask.client]

    def _retry_after(self) -> float:
        """Seconds until half of the queue is answered, at the recent rate."""
        times = self._finish_times
        if len(times) < 2 or times[-1] <= times[0]:
            return 1.0
        per_s = (len(times) - 1) / (times[-1] - times[0])
        return min(max(len(self) / 2 / per_s, 1.0), _MAX_RETRY_AFTER_S)
