"""The engine: requests in, `step()` after `step()`, tokens out. Follow a request's life here, top to bottom."""

import math
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from llama_adapter.llm.engine.async_readback import AsyncReadback, Chosen
from llama_adapter.llm.engine.requests import Finish, Output, Request, ScoreRequest
from llama_adapter.llm.engine.scheduler import Scheduler
from llama_adapter.llm.engine.sequence import Sequence
from llama_adapter.llm.errors import PromptError, PromptTooLongError
from llama_adapter.llm.model.adapter import Prefix
from llama_adapter.llm.runners.eager import Executor, WarmUp
from llama_adapter.llm.runners.prediction import NO_TOKEN

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
        self._pipeline = AsyncReadback(executor)
        self._eos_id = eos_id
        self._scheduler = Scheduler(num_slots=executor.num_slots, max_prefill_tokens=max_prefill_tokens)
        self._ended: list[Output] = []  # requests that ended without a step

    @property
    def num_slots(self) -> int:
        """Rows that can run at once."""
        return self._executor.num_slots

    @property
    def num_rows(self) -> int:
        """Rows that may run at once by now: all slots, or what `limit_rows` left of them."""
        return self._scheduler.num_rows

    @property
    def num_unfinished(self) -> int:
        """Requests that `step()` has still to answer."""
        return len(self._scheduler.waiting) + len(self._scheduler.running) + len(self._ended)

    def project_prefix(self, visual_query_BQD: Tensor) -> list[Prefix]:
        """Visual query (B, Q, D) -> the prefix of each picture; shared by all requests about that picture."""
        return self._executor.project_prefix(visual_query_BQD)

    def warm_up(self, *, prompt_tokens: int, new_tokens: int) -> WarmUp:
        """Run, before the first request, the steps that prompts and answers of up to these lengths may need.

        Raises RuntimeError while requests are unanswered.
        """
        if self.num_unfinished:
            raise RuntimeError("An engine is warmed up before its first request, or when all are answered")
        return self._executor.warm_up(prompt_tokens=prompt_tokens, new_tokens=new_tokens)

    def check(self, prompt_ids: tuple[int, ...], continuations: Iterable[tuple[int, ...]] = ()) -> None:
        """Raise PromptTooLongError or PromptError when such a request could not be answered."""
        config = self._executor.config
        if not prompt_ids:
            raise PromptError("The prompt has no tokens", hint="give at least the begin-of-sequence token")
        longest = 0
        for ids in (prompt_ids, *continuations):
            if not ids:
                raise PromptError("A continuation has no tokens", hint="give every answer at least one character")
            if min(ids) < 0 or max(ids) >= config.vocab_size:
                raise PromptError(
                    f"Token ids must lie in 0..{config.vocab_size - 1}, got {min(ids)}..{max(ids)}",
                    hint="encode the prompt with this model's own tokenizer",
                )
            if ids is not prompt_ids:
                longest = max(longest, len(ids))
        num_positions = len(prompt_ids) + max(longest - 1, 0)
        if num_positions > config.context:
            raise PromptTooLongError(num_positions, config.context)

    def submit(self, request: Request) -> None:
        """Queue a request; raises as `check` does."""
        if isinstance(request, ScoreRequest):
            self.check(request.prompt_ids, request.continuations)
            self._scheduler.waiting.append(request)
            return
        self.check(request.prompt_ids)
        room = self._executor.config.context - len(request.prompt_ids)
        max_new_tokens = min(request.sampling.max_new_tokens, room) - len(request.known_ids)
        if max_new_tokens <= 0:
            self._ended.append(Output(request_id=request.id, finish="length"))
            return
        self._scheduler.waiting.append(Sequence(request, max_new_tokens=max_new_tokens))

    def cancel(self, request_id: int) -> None:
        """Forget a request, waiting or running; its slot is free at once. Unknown ids are ignored."""
        self._ended = [output for output in self._ended if output.request_id != request_id]
        for waiting in list(self._scheduler.waiting):
            if (waiting.request.id if isinstance(waiting, Sequence) else waiting.id) == request_id:
                self._scheduler.waiting.remove(waiting)
        for sequence in list(self._scheduler.running):
            if sequence.request.id == request_id:
                self._pipeline.wipe(sequence, slot=self._scheduler.slot_of(sequence))
                self._leave(sequence)

    def limit_rows(self, num_rows: int) -> None:
        """From now on run no more than `num_rows` at once, or score them; raises ValueError beyond 1..num_slots."""
        self._scheduler.limit_rows(num_rows)

    def reset(self) -> None:
        """Forget all requests, and clear all slots: after a step that raised, which may have left anything in them.

        Who has no answer by then submits again, and may give what is known of it as `known_ids`.
        """
        self._ended.clear()
        self._scheduler.clear()
        self._pipeline.reset(num_slots=self.num_slots)

    def step(self) -> list[Output]:
        """Run one program on the device and return the news; an idle engine returns nothing.

        A device with a queue answers one step late: the first step's news come with the second.
        """
        self.timer.enter("pre")
        if self._ended:
            ended, self._ended = self._ended, []
            return ended
        if scored := self._scheduler.next_scored():
            return self._score(scored)
        first_slot = len(self._scheduler.running)
        if admitted := self._scheduler.next_admitted():
            self.timer.enter("forward")
            return self._extend(self._pipeline.prefill(admitted, first_slot=first_slot))
        if running := list(self._scheduler.running):
            self.timer.enter("forward")
            return self._extend(self._pipeline.decode(running))
        return []

    def _extend(self, chosen: Chosen) -> list[Output]:
        """Give sequences their next tokens; those that end leave their slots."""
        self.timer.enter("post")
        outputs: list[Output] = []
        ended: list[Sequence] = []
        for sequence, token_id in zip(*chosen, strict=True):
            if sequence.has_ended:
                continue
            finish: Finish | None = None
            if token_id == NO_TOKEN:
                finish = "not_finite"
            else:
                sequence.token_ids.append(token_id)
                if token_id == self._eos_id:
                    finish = "stop"
                elif len(sequence.token_ids) == sequence.max_new_tokens:
                    finish = "length"
            has_text = finish not in ("not_finite", "stop")
            outputs.append(
                Output(request_id=sequence.request.id, token_id=token_id if has_text else None, finish=finish)
            )
            if finish is not None:
                ended.append(sequence)
                slot = self._scheduler.slot_of(sequence)
                if finish == "not_finite":
                    self._pipeline.clear(slot)
                else:
                    self._pipeline.wipe(sequence, slot=slot)
        # Only now: before any row moves, each that ends has left its slot clean.
        for sequence in ended:
            self._leave(sequence)
        return outputs

    def _score(self, requests: list[ScoreRequest]) -> list[Output]:
        self.timer.enter("forward")
        scores = self._executor.score(requests)
        self.timer.enter("post")
        return [
            Output(
                request_id=request.id,
                finish="scored" if all(map(math.isfinite, logprobs)) else "not_finite",
                logprobs=tuple(logprobs),
            )
            for request, logprobs in zip(requests, scores, strict=True)
        ]

    def _leave(self, sequence: Sequence) -> None:
        sequence.has_ended = True
        move = self._scheduler.retire(sequence)
        if move is not None:
            self._pipeline.move(self._scheduler.running[move.target], source=move.source, target=move.target)
