"""The engine: `submit` takes requests, and each `step` returns tokens.

To understand it, read `submit`, `step`, `_settle` and `_end` in this order.
"""

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from llama_adapter.llm.engine.requests import Output, Request, ScoreRequest
from llama_adapter.llm.engine.scheduler import Scheduler
from llama_adapter.llm.engine.sequence import Sequence
from llama_adapter.llm.errors import PromptError, PromptTooLongError
from llama_adapter.llm.prefix import PictureTokens, Prefix
from llama_adapter.llm.runners.base import Result, Runner, Scores, WarmUp


class Engine:
    """Continuous batching on one runner. Not thread-safe: one thread must call all methods."""

    def __init__(self, runner: Runner, *, eos_id: int | Collection[int]) -> None:
        """`eos_id` is the token that ends an answer, or several that each end one."""
        # Called when a stage of a step begins, with `pre`, `forward` or `post`.
        self.enter_stage: Callable[[str], None] = lambda stage: None
        self._runner = runner
        self._end_ids = frozenset([eos_id] if isinstance(eos_id, int) else eos_id)
        self._scheduler = Scheduler(runner.config, mixes=runner.runs_mixed)
        self._early: list[Output] = []  # requests that end without a step

    @property
    def num_slots(self) -> int:
        """Most rows that run at once."""
        return self._runner.config.num_slots

    @property
    def num_rows(self) -> int:
        """Most rows that run at once now: all slots, or the limit of `limit_rows`."""
        return self._scheduler.num_rows

    @property
    def num_unfinished(self) -> int:
        """Requests without a complete answer."""
        return len(self._scheduler.waiting) + len(self._scheduler.running) + len(self._early)

    @property
    def num_put_back(self) -> int:
        """How often a row was put back into the queue because the rows together had filled the cache."""
        return self._scheduler.num_put_back

    def project_prefix(self, visual_query_BQD: Any) -> list[Prefix]:
        """Visual query (B, Q, D) -> the prefix of each picture, shared by all requests about that picture."""
        return self._runner.project_prefix(visual_query_BQD)

    def stored_prefix(self, k_ANQH: np.ndarray, v_ANQH: np.ndarray) -> Prefix:
        """The prefix of a picture whose keys and gated values were computed earlier."""
        return self._runner.stored_prefix(k_ANQH, v_ANQH)

    def learned_prefix(self) -> Prefix:
        """The prefix of the adapter's learned queries, without a visual query, for adapters trained on texts."""
        sizes = self._runner.config.decoder
        [prefix] = self._runner.project_prefix(np.zeros((1, sizes.num_queries, sizes.dim), np.float32))
        return prefix

    def empty_prefix(self) -> Prefix:
        """The prefix of a request without a picture. Its values are zero, so adapter attention adds exactly zero."""
        return self._runner.empty_prefix()

    def warm_up(self, *, prompt_tokens: int, new_tokens: int) -> WarmUp:
        """Run the steps that prompts and answers of up to these lengths may need, before the first request.

        Raises RuntimeError while requests are unfinished.
        """
        if self.num_unfinished:
            raise RuntimeError("The engine can only be warmed up while it has no unfinished request")
        return self._runner.warm_up(prompt_tokens=prompt_tokens, new_tokens=new_tokens)

    def check(
        self,
        prompt_ids: tuple[int, ...],
        continuations: Iterable[tuple[int, ...]] = (),
        pictures: Iterable[PictureTokens] = (),
    ) -> None:
        """Raise PromptTooLongError or PromptError if the model cannot answer a request with this prompt."""
        config = self._runner.config
        vocab_size = config.decoder.vocab_size
        if not prompt_ids:
            raise PromptError("The prompt has no tokens", hint="give at least the begin-of-sequence token")
        num_positions = len(prompt_ids)
        for ids in (prompt_ids, *continuations):
            if not ids:
                raise PromptError("A continuation has no tokens", hint="give every answer at least one character")
            if min(ids) < 0 or max(ids) >= vocab_size:
                raise PromptError(
                    f"Token ids must lie in 0..{vocab_size - 1}, got {min(ids)}..{max(ids)}",
                    hint="encode the prompt with this model's own tokenizer",
                )
            if ids is not prompt_ids:
                num_positions = max(num_positions, len(prompt_ids) + len(ids) - 1)
        if num_positions > config.context:
            raise PromptTooLongError(num_positions, config.context)
        stop = 0
        for picture in pictures:
            if picture.start < stop or picture.stop > len(prompt_ids):
                raise PromptError(
                    f"A picture's tokens are at {picture.start} to {picture.stop - 1} of {len(prompt_ids)} tokens",
                    hint="name the pictures of a prompt in their order, each in its own place",
                )
            stop = picture.stop

    def submit(self, request: Request) -> None:
        """Queue a request. Raises as `check`."""
        if isinstance(request, ScoreRequest):
            self.check(request.prompt_ids, request.continuations, request.pictures)
            self._scheduler.waiting.append(request)
            return
        self.check(request.prompt_ids, pictures=request.pictures)
        most = min(self._runner.config.context, request.sampling.max_length or self._runner.config.context)
        room = most - len(request.prompt_ids)
        max_new_tokens = min(request.sampling.max_new_tokens, room) - len(request.known_ids)
        if max_new_tokens <= 0:
            self._early.append(Output(request_id=request.id, finish="length"))
            return
        self._scheduler.add(request, max_new_tokens=max_new_tokens)

    def step(self) -> list[Output]:
        """Run one program on the device and return its events. An idle engine returns an empty list.

        On a device with a queue, events are returned one step late.
        """
        self.enter_stage("pre")
        if self._early:
            early, self._early = self._early, []
            return early
        while (sequence := self._scheduler.surplus()) is not None:
            self._end(sequence)
            self._scheduler.put_back(sequence)
        plan = self._scheduler.schedule()
        if plan is None:
            return []
        try:
            self.enter_stage("forward")
            result = self._runner.run(plan)
        except BaseException:
            self._scheduler.forget_kept(plan)
            raise
        return self._settle(result)

    def _settle(self, result: Result) -> list[Output]:
        """Turn a result into events. Rows that end leave their slots."""
        self.enter_stage("post")
        if isinstance(result, Scores):
            return [
                Output(
                    request_id=row,
                    finish="scored" if all(map(math.isfinite, logprobs)) else "not_finite",
                    logprobs=tuple(logprobs),
                )
                for row, logprobs in zip(result.rows, result.logprobs, strict=True)
            ]
        outputs: list[Output] = []
        ended: list[tuple[Sequence, bool]] = []
        for index, (row, token_id) in enumerate(zip(result.rows, result.token_ids, strict=True)):
            sequence = self._scheduler.find(row)
            if sequence is None:  # it ended or was cancelled after this step was started
                continue
            finish = sequence.take(token_id, end_ids=self._end_ids)
            text_id = None if finish in ("not_finite", "too_complex", "stop") else token_id
            num_logprobs = None if text_id is None else sequence.request.num_logprobs
            logprobs = () if num_logprobs is None else (result.logprobs[index],)
            top = tuple(result.top[index][:num_logprobs]) if num_logprobs else ()
            outputs.append(Output(request_id=sequence.id, token_id=text_id, finish=finish, logprobs=logprobs, top=top))
            if finish is not None:
                ended.append((sequence, finish != "not_finite"))
        # From the last slot to the first, so that a row that moves into a freed slot never ends in the same step.
        for sequence, is_finite in sorted(ended, key=lambda pair: pair[0].slot, reverse=True):
            self._end(sequence, is_finite=is_finite)
        return outputs

    def _end(self, sequence: Sequence, *, is_finite: bool = True) -> None:
        """End a row; no other method does. Its slot is cleaned, and the last running row moves into it."""
        if is_finite:
            self._clean_unread(sequence, slot=sequence.slot)
        else:
            self._runner.clear(sequence.slot)
        moved = self._scheduler.retire(sequence)
        if moved is not None:
            source = len(self._scheduler.running)
            self._runner.move(source, moved.slot, num_tokens=moved.num_cached_tokens)
            self._clean_unread(moved, slot=source)

    def _clean_unread(self, sequence: Sequence, *, slot: int) -> None:
        """Clear what an unread step of a sequence wrote to a slot.

        Its numbers may turn out not to be finite after another row has taken the slot.
        """
        if sequence.has_unread_step:
            # Before the first token is read, the numbers of prompt and picture are not known to be finite either.
            self._runner.clear(slot, position=sequence.num_cached_tokens - 1 if sequence.token_ids else None)

    def cancel(self, request_id: int) -> None:
        """Remove a waiting or running request. Its slot is free at once. Unknown ids are ignored."""
        self._early = [output for output in self._early if output.request_id != request_id]
        for sequence in self._scheduler.cancel(request_id):
            self._end(sequence)

    def limit_rows(self, num_rows: int) -> None:
        """Run or score at most `num_rows` rows at once from now on. Raises ValueError outside 1..num_slots."""
        self._scheduler.limit_rows(num_rows)

    def reset(self) -> None:
        """Remove all requests and clear all slots, after a step that raised an exception.

        The caller must submit unfinished requests again, with the tokens received so far as `known_ids`.
        """
        self._early.clear()
        self._scheduler.clear()
        self._runner.reset()
