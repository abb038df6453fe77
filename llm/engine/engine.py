"""The engine: requests in, `step()` after `step()`, tokens out. Follow a request's life here, top to bottom."""

import math
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from llm.engine.sampler import sample
from llm.engine.scheduler import Scheduler
from llm.engine.sequence import Finish, Output, Request, Sequence
from llm.errors import PromptError, PromptTooLongError
from llm.model.adapter import Prefix
from llm.runtime.executor import Executor, ScoreRow

MAX_PREFILL_TOKENS = 8192


class StageTimer(Protocol):
    """Told at every boundary which stage begins: `pre`, `forward`, `post`."""

    def enter(self, stage: str) -> None: ...


class NoTimer:
    """Measures nothing."""

    def enter(self, stage: str) -> None:
        return


class Engine:
    """Continuous batching over one executor. Not thread-safe: one thread submits and steps."""

    def __init__(self, executor: Executor, *, eos_id: int, max_prefill_tokens: int = MAX_PREFILL_TOKENS) -> None:
        self.timer: StageTimer = NoTimer()
        self._executor = executor
        self._eos_id = eos_id
        self._scheduler = Scheduler(num_slots=executor.num_slots, max_prefill_tokens=max_prefill_tokens)
        self._ended: list[Output] = []  # requests that ended without a step

    @property
    def num_slots(self) -> int:
        """Rows that can run at once."""
        return self._executor.num_slots

    @property
    def num_unfinished(self) -> int:
        """Requests that `step()` has still to answer."""
        return len(self._scheduler.waiting) + len(self._scheduler.running) + len(self._ended)

    def project_prefix(self, visual_query_BQD: Tensor) -> list[Prefix]:
        """Visual query (B, Q, D) -> the prefix of each picture; shared by all requests about that picture."""
        return self._executor.project_prefix(visual_query_BQD)

    def check(self, prompt_ids: tuple[int, ...], choices: Iterable[tuple[int, ...]] = ()) -> None:
        """Raise PromptTooLongError or PromptError when such a request could not be answered."""
        config = self._executor.config
        if not prompt_ids:
            raise PromptError("The prompt has no tokens", hint="give at least the begin-of-sequence token")
        longest_choice = 0
        for ids in (prompt_ids, *choices):
            if not ids:
                raise PromptError("A choice has no tokens", hint="give every choice at least one character")
            if min(ids) < 0 or max(ids) >= config.vocab_size:
                raise PromptError(
                    f"Token ids must lie in 0..{config.vocab_size - 1}, got {min(ids)}..{max(ids)}",
                    hint="encode the prompt with this model's own tokenizer",
                )
            if ids is not prompt_ids:
                longest_choice = max(longest_choice, len(ids))
        num_positions = len(prompt_ids) + max(longest_choice - 1, 0)
        if num_positions > config.context:
            raise PromptTooLongError(num_positions, config.context)

    def submit(self, request: Request) -> None:
        """Queue a request; raises as `check` does."""
        self.check(request.prompt_ids, request.choices)
        room = self._executor.config.context - len(request.prompt_ids)
        max_new_tokens = min(request.sampling.max_new_tokens, room)
        if max_new_tokens == 0 and not request.choices:
            self._ended.append(Output(request_id=request.id, finish="length"))
            return
        self._scheduler.waiting.append(Sequence(request, max_new_tokens=max_new_tokens))

    def cancel(self, request_id: int) -> None:
        """Forget a request, waiting or running; its slot is free at once. Unknown ids are ignored."""
        self._ended = [output for output in self._ended if output.request_id != request_id]
        for sequence in list(self._scheduler.waiting):
            if sequence.request.id == request_id:
                self._scheduler.waiting.remove(sequence)
        for sequence in list(self._scheduler.running):
            if sequence.request.id == request_id:
                self._leave(sequence)

    def step(self) -> list[Output]:
        """Run one program on the device and return its news; an idle engine returns nothing."""
        self.timer.enter("pre")
        if self._ended:
            ended, self._ended = self._ended, []
            return ended
        if scored := self._scheduler.next_scored():
            return self._score(scored)
        first_slot = len(self._scheduler.running)
        if admitted := self._scheduler.next_admitted():
            self.timer.enter("forward")
            logits_RV = self._executor.prefill(
                [sequence.request.prompt_ids for sequence in admitted],
                [sequence.request.prefix for sequence in admitted],
                first_slot=first_slot,
            )
            return self._extend(admitted, logits_RV, first_slot=first_slot)
        if running := list(self._scheduler.running):
            self.timer.enter("forward")
            logits_RV = self._executor.decode(
                [sequence.token_ids[-1] for sequence in running],
                [sequence.num_cached_tokens for sequence in running],
            )
            return self._extend(running, logits_RV, first_slot=0)
        return []

    def _extend(self, sequences: list[Sequence], logits_RV: Tensor, *, first_slot: int) -> list[Output]:
        """Choose the next token of the rows from `first_slot` on; those that end leave their slots."""
        self.timer.enter("post")
        outputs: list[Output] = []
        ended: list[Sequence] = []
        token_ids = sample(logits_RV, [sequence.next_draw() for sequence in sequences])
        for slot, (sequence, token_id) in enumerate(zip(sequences, token_ids, strict=True), start=first_slot):
            finish: Finish | None = None
            if token_id is None:
                finish = "not_finite"
                self._executor.clear(slot)
            else:
                sequence.token_ids.append(token_id)
                if token_id == self._eos_id:
                    finish, token_id = "stop", None
                elif len(sequence.token_ids) == sequence.max_new_tokens:
                    finish = "length"
            if finish is not None:
                ended.append(sequence)
            outputs.append(Output(request_id=sequence.request.id, token_id=token_id, finish=finish))
        # Only now: what a moved row has in its slot is counted with its new token.
        for sequence in ended:
            self._leave(sequence)
        return outputs

    def _score(self, sequences: list[Sequence]) -> list[Output]:
        self.timer.enter("forward")
        rows = [
            ScoreRow(
                prompt_ids=sequence.request.prompt_ids,
                choices=sequence.request.choices,
                prefix=sequence.request.prefix,
            )
            for sequence in sequences
        ]
        scores = self._executor.score(rows)
        self.timer.enter("post")
        return [
            Output(
                request_id=sequence.request.id,
                finish="choice" if all(map(math.isfinite, logprobs)) else "not_finite",
                choice_logprobs=tuple(logprobs),
            )
            for sequence, logprobs in zip(sequences, scores, strict=True)
        ]

    def _leave(self, sequence: Sequence) -> None:
        move = self._scheduler.retire(sequence)
        if move is not None:
            moved = self._scheduler.running[move.target]
            self._executor.move(move.source, move.target, num_tokens=moved.num_cached_tokens)
