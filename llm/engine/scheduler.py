"""Who runs next: waiting and running sequences, and the slots they hold. Policy only, no tensors.

Running sequences hold slots 0..n-1: the list index is the slot. When one leaves, the last takes its place.
"""

from collections import deque
from typing import NamedTuple, TypeVar

from llama_adapter.llm.engine.requests import ScoreRequest
from llama_adapter.llm.engine.sequence import Sequence

_Waiting = TypeVar("_Waiting", Sequence, ScoreRequest)


class Move(NamedTuple):
    """The sequence in slot `source` now belongs in slot `target`."""

    source: int
    target: int


class Scheduler:
    """First come, first served; new sequences are admitted before running ones go on."""

    def __init__(self, *, num_slots: int, max_prefill_tokens: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        self.num_slots = num_slots
        self.num_rows = num_slots  # of them, from slot 0 on, those that are given out
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Sequence | ScoreRequest] = deque()
        self.running: list[Sequence] = []

    def limit_rows(self, num_rows: int) -> None:
        """From now on run no more than so many at once; those that do already are left alone.

        Raises ValueError for less than one, and for more than there are slots.
        """
        if not 1 <= num_rows <= self.num_slots:
            raise ValueError(f"num_rows must lie in 1..{self.num_slots}, got {num_rows}")
        self.num_rows = num_rows

    def clear(self) -> None:
        """Forget all sequences."""
        self.waiting.clear()
        self.running.clear()

    def next_scored(self) -> list[ScoreRequest]:
        """Take the score requests at the head of the queue: they need no slot."""
        return self._take(ScoreRequest, limit=self.num_rows)

    def next_admitted(self) -> list[Sequence]:
        """Take waiting sequences into the free slots; they are running from now on."""
        admitted = self._take(Sequence, limit=self.num_rows - len(self.running))
        self.running.extend(admitted)
        return admitted

    def slot_of(self, sequence: Sequence) -> int:
        """The slot that a running sequence holds."""
        return self.running.index(sequence)

    def retire(self, sequence: Sequence) -> Move | None:
        """End a running sequence; says which slot must move so that slots in use stay 0..n-1."""
        slot = self.slot_of(sequence)
        last = self.running.pop()
        if last is sequence:
            return None
        self.running[slot] = last
        return Move(source=len(self.running), target=slot)

    def _take(self, kind: type[_Waiting], *, limit: int) -> list[_Waiting]:
        """From the head of the queue, as many of the kind as fit in `limit` rows and one padded prefill."""
        taken: list[_Waiting] = []
        widest = 0
        while self.waiting and len(taken) < limit:
            head = self.waiting[0]
            if not isinstance(head, kind):
                break
            widest = max(widest, _num_tokens(head))
            if taken and widest * (len(taken) + 1) > self.max_prefill_tokens:
                break
            taken.append(head)
            self.waiting.popleft()
        return taken


def _num_tokens(waiting: Sequence | ScoreRequest) -> int:
    """Length of the row of its first forward pass: the prompt, and behind it what is scored."""
    if isinstance(waiting, Sequence):
        return len(waiting.prompt_ids)
    return len(waiting.prompt_ids) + sum(len(continuation) - 1 for continuation in waiting.continuations)
