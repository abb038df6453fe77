"""Decides what runs next: waiting and running sequences, and the slots they have. It uses no tensors.

Running sequences have slots 0..n-1: the index in the list is the slot. When a sequence ends, the last one
takes its slot.
"""

import itertools
from collections import deque
from collections.abc import Hashable, Iterable
from typing import TypeVar

from llama_adapter.llm.config import EngineConfig
from llama_adapter.llm.engine.kept_prompts import KeptPrompts
from llama_adapter.llm.engine.requests import GenerateRequest, Request, ScoreRequest
from llama_adapter.llm.engine.sequence import Sequence
from llama_adapter.llm.runners.base import DecodePlan, MixedPlan, Pictures, Plan, PrefillPlan, ScorePlan, most_logprobs

_rows = itertools.count()  # unique among all engines, because a runner may still return a step of an earlier engine

_Waiting = TypeVar("_Waiting", Sequence, ScoreRequest)


class Scheduler:
    """First come, first served. New sequences are admitted before running ones continue, or in the same program."""

    def __init__(self, config: EngineConfig, *, mixes: bool) -> None:
        """With `mixes`, running sequences continue while new ones are admitted, in mixed plans."""
        self._config, self._mixes = config, mixes
        self.num_rows = config.num_slots  # most rows at once, see `limit_rows`
        self.waiting: deque[Sequence | ScoreRequest] = deque()
        self.running: list[Sequence] = []
        self._kept = KeptPrompts(config)
        self.num_put_back = 0  # sequences that were put back into the queue, see `surplus`
        self._by_row: dict[int, Sequence] = {}  # the running sequences

    def limit_rows(self, num_rows: int) -> None:
        """Run at most `num_rows` at once from now on. Running sequences are not affected. Raises ValueError."""
        if not 1 <= num_rows <= self._config.num_slots:
            raise ValueError(f"num_rows must lie in 1..{self._config.num_slots}, got {num_rows}")
        self.num_rows = num_rows

    def add(self, request: GenerateRequest, *, max_new_tokens: int) -> None:
        """Queue a request that generates at least one token."""
        self.waiting.append(Sequence(request, row=next(_rows), max_new_tokens=max_new_tokens))

    def surplus(self) -> Sequence | None:
        """The running sequence that came last, if the next step of all needs more blocks than there are, else None.

        The caller must retire it and put it back, until there is no surplus.
        """
        if self._num_free_blocks() >= 0:
            return None
        return max(self.running, key=lambda sequence: sequence.first_row)

    def put_back(self, sequence: Sequence) -> None:
        """Queue a retired sequence at the head. It goes on after the tokens that were read."""
        self.waiting.appendleft(sequence.begun_again(row=next(_rows)))
        self.num_put_back += 1

    def _num_free_blocks(self) -> int:
        """Spare blocks of the cache beyond those that running sequences need for their next step."""
        return self._config.spare_blocks - sum(map(self._num_extra_blocks, self.running))

    def _num_extra_blocks(self, sequence: Sequence) -> int:
        return self._config.extra_blocks(sequence.next_position + 1)

    def schedule(self) -> Plan | None:
        """The next program; None if there is nothing to do.

        Its sequences count as running, and their tokens as planned.
        """
        if requests := self._take(ScoreRequest, limit=self.num_rows):
            return ScorePlan(
                rows=[request.id for request in requests],
                prompts=[request.prompt_ids for request in requests],
                continuations=[request.continuations for request in requests],
                prefixes=[request.prefix for request in requests],
                pictures=_pictures(requests),
                kept=[self._kept.use(request) for request in requests],
                dropped=self._kept.take_dropped(),
            )
        admitted = self._take(Sequence, limit=self.num_rows - len(self.running))
        if not admitted:
            return self._decode() if self.running else None
        if self.running and self._mixes:
            return MixedPlan(self._decode(), self._prefill(admitted))
        return self._prefill(admitted)

    def _prefill(self, admitted: list[Sequence]) -> PrefillPlan:
        """The prefill of admitted sequences, which are running from now on."""
        first_slot = len(self.running)
        for slot, sequence in enumerate(admitted, start=first_slot):
            sequence.slot = slot
            self._by_row[sequence.row] = sequence
        self.running += admitted
        return PrefillPlan(
            rows=[sequence.row for sequence in admitted],
            prompts=[sequence.prompt_ids for sequence in admitted],
            prefixes=[sequence.request.prefix for sequence in admitted],
            draws=[sequence.next_draw() for sequence in admitted],
            first_slot=first_slot,
            num_logprobs=most_logprobs(sequence.request.num_logprobs for sequence in admitted),
            pictures=_pictures([sequence.request for sequence in admitted]),
            kept=[self._kept.use(sequence.request) for sequence in admitted],
            dropped=self._kept.take_dropped(),
        )

    def _decode(self) -> DecodePlan:
        """A step of all running sequences."""
        # No step is computed if every sequence ends with a token that has not been read yet.
        rows = [] if all(sequence.is_complete for sequence in self.running) else self.running
        return DecodePlan(
            rows=[sequence.row for sequence in rows],
            positions=[sequence.next_position for sequence in rows],
            draws=[sequence.next_draw() for sequence in rows],
            num_logprobs=most_logprobs(sequence.request.num_logprobs for sequence in rows),
        )

    def forget_kept(self, plan: Plan) -> None:
        """Forget the beginnings that a plan was to keep, after the runner raised an exception."""
        prefill = plan.prefill if isinstance(plan, MixedPlan) else plan
        if not isinstance(prefill, DecodePlan):
            self._kept.forget(prefill.kept, prefill.dropped)

    def find(self, row: int) -> Sequence | None:
        """The running sequence of a row; None if it has ended."""
        return self._by_row.get(row)

    def retire(self, sequence: Sequence) -> Sequence | None:
        """End a running sequence.

        Returns the sequence that gets its slot and whose data are still in slot `len(running)`; None if the ended
        sequence had the last slot.
        """
        del self._by_row[sequence.row]
        last = self.running.pop()
        if last is sequence:
            return None
        self.running[sequence.slot] = last
        last.slot = sequence.slot
        return last

    def cancel(self, request_id: int) -> list[Sequence]:
        """Remove a request from the queue. Returns its running sequences, which the caller must retire."""
        self.waiting = deque(waiting for waiting in self.waiting if waiting.id != request_id)
        return [sequence for sequence in self.running if sequence.id == request_id]

    def clear(self) -> None:
        """Forget all requests."""
        self.waiting.clear()
        self.running.clear()
        self._by_row.clear()
        self._kept.clear()

    def _take(self, kind: type[_Waiting], *, limit: int) -> list[_Waiting]:
        """Remove requests of one kind from the head of the queue.

        As many as fit `limit` rows, one padded prefill, and the cache with a next token each. Of those with the same
        new beginning, the first comes alone, so that the others find it kept. Scores have one kept beginning, or none.
        """
        taken: list[_Waiting] = []
        begun: list[Hashable] = []  # new beginnings
        known: list[Hashable] = []  # the kept beginning of each, or None
        widest, num_free_blocks = 0, self._num_free_blocks()
        while self.waiting and len(taken) < limit:
            head = self.waiting[0]
            if not isinstance(head, kind):
                break
            request = head.request if isinstance(head, Sequence) else head
            num_known = self._kept.num_known(request)
            widest = max(widest, head.num_prefill_tokens - num_known)
            if taken and widest * (len(taken) + 1) > self._config.max_prefill_tokens:
                break
            if isinstance(head, Sequence):
                num_free_blocks -= self._num_extra_blocks(head)
            key = self._kept.key(request)
            known.append(key if num_known else None)
            is_other = kind is ScoreRequest and known[-1] != known[0]
            if num_free_blocks < 0 or is_other or (key in begun and key is not None):
                break
            begun.append(None if num_known else key)
            taken.append(head)
            self.waiting.popleft()
        return taken


def _pictures(requests: Iterable[Request]) -> list[Pictures]:
    pictures: list[Pictures] = [request.pictures for request in requests]
    return pictures if any(pictures) else []
