"""Runs the executor's steps and reads what they chose: at once, or, where the device has a queue, one step late.

Late reading keeps the device busy: step n + 1 takes its tokens from step n on the device, and the host reads the ids of
step n while step n + 1 runs. So a row that step n ended is in step n + 1 too, and what comes of it there is dropped.
"""

# R rows, from slot 0 on

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch

from llama_adapter.llm.engine.sampler import choose
from llama_adapter.llm.engine.sequence import Sequence
from llama_adapter.llm.runners.eager import Executor
from llama_adapter.llm.runners.prediction import Prediction
from llama_adapter.runtime.devices.transfer import Fetched


class Chosen(NamedTuple):
    """The next token of each sequence, NO_TOKEN where its logits were not finite numbers."""

    sequences: Seq[Sequence]
    token_ids: Seq[int]


class _Step(NamedTuple):
    """A step that the device was given, and the ids that it will choose."""

    sequences: Seq[Sequence]
    ids: Fetched

    def read(self) -> Chosen:
        return Chosen(self.sequences, self.ids.read())


class AsyncReadback:
    """Steps on their way through one executor, at most one of them not read yet."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._unread: _Step | None = None  # always None where ids are read at once
        with torch.inference_mode():
            self._newest_ids = executor.transfer.upload([0] * executor.num_slots)  # of each slot, on the device

    def prefill(self, sequences: Seq[Sequence], *, first_slot: int) -> Chosen:
        """Let new sequences into slots `first_slot` and up; returns what was read, of this step or of the last one."""
        prompts = [sequence.prompt_ids for sequence in sequences]
        prefixes = [sequence.request.prefix for sequence in sequences]
        return self._exchange(
            self._choose(sequences, self._executor.prefill(prompts, prefixes, first_slot=first_slot), first_slot)
        )

    def decode(self, sequences: Seq[Sequence]) -> Chosen:
        """One more token for all running sequences, in slots 0 and up; returns as `prefill` does.

        Without a step where every one of them ends with tokens that are not read yet.
        """
        if all(sequence.is_complete for sequence in sequences):
            return self._exchange(None)
        newest = self._newest_ids[: len(sequences)] if self._executor.queued else [s.token_ids[-1] for s in sequences]
        positions = [sequence.next_position for sequence in sequences]
        return self._exchange(self._choose(sequences, self._executor.decode(newest, positions), 0))

    def wipe(self, sequence: Sequence, *, slot: int) -> None:
        """Undo what unread steps of a sequence did in a slot: they may prove not finite when somebody else is there."""
        if self._unread is None or sequence not in self._unread.sequences:
            return
        # Before the first token is read, nothing is known of the prompt and of the picture either.
        self._executor.clear(slot, position=sequence.last_fed_position if sequence.token_ids else None)

    def clear(self, slot: int) -> None:
        """Forget all of a slot, whose numbers are not finite."""
        self._executor.clear(slot)

    def move(self, sequence: Sequence, *, source: int, target: int) -> None:
        """What `sequence` has in slot `source` replaces slot `target`."""
        self._executor.move(source, target, num_tokens=sequence.num_cached_tokens)
        if self._executor.queued:
            with torch.inference_mode():
                self._newest_ids[target] = self._newest_ids[source]
            self.wipe(sequence, slot=source)

    def reset(self, *, num_slots: int) -> None:
        """Forget the step that is not read, and what is in the first `num_slots` slots."""
        self._unread = None
        for slot in range(num_slots):
            self._executor.clear(slot)

    def _choose(self, sequences: Seq[Sequence], prediction: Prediction, first_slot: int) -> _Step:
        transfer = self._executor.transfer
        ids_R = choose(prediction, [sequence.next_draw() for sequence in sequences], upload=transfer.upload)
        if self._executor.queued:
            with torch.inference_mode():
                # A row without a token is fed some token until that is known.
                self._newest_ids[first_slot : first_slot + len(sequences)] = ids_R.clamp(min=0)
        return _Step(sequences, transfer.fetch(ids_R))

    def _exchange(self, step: _Step | None) -> Chosen:
        """Read `step`, or keep it and read the one before."""
        if self._executor.queued:
            step, self._unread = self._unread, step
        return Chosen((), ()) if step is None else step.read()
