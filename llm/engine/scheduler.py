"""Who runs next: waiting and running sequences, and the slots they hold. Policy only, no tensors.

Running sequences hold slots 0..n-1: the list index is the slot. When one leaves, the last takes its place.
"""

from collections import deque
from typing import NamedTuple

from llama_adapter.llm.engine.sequence import Sequence


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
        self.waiting: deque[Sequence] = deque()
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

    def next_scored(self) -> list[Sequence]:
        """Take the sequences at the head of the queue that are scored: they need no slot."""
        return self._take(scored=True, limit=self.num_rows)

    def next_admitted(self) -> list[Sequence]:
        """Take waiting sequences into the free slots; they are running from now on."""
        admitted = self._take(scored=False, limit=self.num_rows - len(self.running))
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

    def _take(self, *, scored: bool, limit: int) -> list[Sequence]:
        """From the head of the queue, as many of the kind as fit in `limit` rows and one padded prefill."""
        taken: list[Sequence] = []
        widest = 0
        while self.waiting and len(taken) < limit:
            head = self.waiting[0]
            if bool(head.request.choices) != scored:
                break
            widest = max(widest, head.num_prefill_tokens)
            if taken and widest * (len(taken) + 1) > self.max_prefill_tokens:
                break
            taken.append(self.waiting.popleft())
        return taken
