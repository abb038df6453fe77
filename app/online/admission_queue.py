"""Requests between their arrival and the engine: first their pictures are read, then they wait for a slot.

No threads here: the service guards it with its lock.
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
    task: ReadingTask | None = None  # from the beginning of its reading on
    reading: PictureReading | None = None  # from the end of its reading on
    conversation: ActiveRequest | None = None  # from its admission on
    has_text: bool = False
    is_done: bool = False

    def converse(self) -> ActiveRequest:
        """The request as the engine's loop takes it; its times count from `submit`."""
        read_ms = 0.0 if self.reading is None else self.reading.elapsed_ms
        waited_ms = (time.perf_counter() - self.handle.submitted) * 1e3 - read_ms
        return ActiveRequest(
            index=self.handle.id,
            picture=self.ask.label,
            digest="" if self.reading is None else self.reading.digest,
            prompt=self.prompt,
            sampling=self.ask.sampling,
            task=self.ask.task,
            stop=self.ask.stop,
            started=self.handle.submitted,
            ms={"queue": max(0.0, waited_ms), "read": read_ms},
        )

    def admit(self) -> "Admitted":
        """From now on it belongs to the engine."""
        assert self.reading is not None, "pictures are read before requests are admitted"
        self.conversation = self.converse()
        return Admitted(entry=self, reading=self.reading, conversation=self.conversation)


@dataclass(eq=False, kw_only=True, slots=True)
class Admitted:
    """A request in the engine's hands."""

    entry: Entry
    reading: PictureReading
    conversation: ActiveRequest
    encoded: EncodedPicture | None = None  # of a picture that is encoded already
    request_id: int = -1  # in the loop, from its submission on

    @property
    def pixels(self) -> np.ndarray:
        """Of a picture that was read well and is not encoded yet: uint8 (size, size, 3)."""
        assert self.reading.pixels is not None
        return self.reading.pixels


class AdmissionQueue:
    """Takes turns between clients for the engine, and refuses what is too much."""

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
        """Whether there is a request for the engine."""
        return len(self._ready) > 0

    def check(self, client: str, num_bytes: int, *, num_slow: int = 0) -> None:
        """Raise BusyError when such a request is one too many. `num_slow` of those that wait have their own bound."""
        limits, num_waiting = self._limits, len(self) - num_slow
        if self._num_of[client] >= limits.max_waiting_per_client:
            raise BusyError(
                f"{self._num_of[client]} requests of this client wait, which is its share of the queue",
                hint="wait for answers before asking more",
                retry_after_s=self._retry_after(),
            )
        if num_waiting >= limits.max_waiting or (self and self._num_bytes + num_bytes > limits.max_waiting_bytes):
            raise BusyError(
                f"The queue is full: {len(self)} requests wait, with {self._num_bytes / 2**20:.0f} MiB of pictures",
                hint="ask again later",
                retry_after_s=self._retry_after(),
            )

    def add(self, entry: Entry) -> None:
        """Let a request in; its picture is to be read. Also one that was taken, and whose picture is unknown again."""
        self._entries.add(entry)
        self._num_of[entry.ask.client] += 1
        self._num_bytes += len(entry.ask.picture)

    def make_ready(self, entry: Entry) -> None:
        """Its picture is read; nothing happens when it has left the room."""
        if entry in self._entries:
            self._ready.put(entry, owner=entry.ask.client)

    def take_ready(self, count: int) -> list[Entry]:
        """Up to `count` requests for the engine; they leave the room."""
        taken: list[Entry] = []
        while len(taken) < count and (entry := self._ready.take()) is not None:
            self._leave(entry)
            taken.append(entry)
        return taken

    def remove(self, entry: Entry) -> bool:
        """Let a request out; says whether it was in the room."""
        if entry not in self._entries:
            return False
        self._ready.remove(entry, owner=entry.ask.client)
        self._leave(entry)
        return True

    def note_finish(self, now: float) -> None:
        """A request was answered at `now`: how soon others may come is told by that."""
        self._finish_times.append(now)

    def _leave(self, entry: Entry) -> None:
        self._entries.discard(entry)
        self._num_bytes -= len(entry.ask.picture)
        self._num_of[entry.ask.client] -= 1
        if not self._num_of[entry.ask.client]:
            del self._num_of[entry.ask.client]

    def _retry_after(self) -> float:
        """Until half of the queue should be gone, at the speed of the last answers."""
        times = self._finish_times
        if len(times) < 2 or times[-1] <= times[0]:
            return 1.0
        per_s = (len(times) - 1) / (times[-1] - times[0])
        return min(max(len(self) / 2 / per_s, 1.0), _MAX_RETRY_AFTER_S)
