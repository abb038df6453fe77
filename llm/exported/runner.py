"""The runner of exported decoders. It uses numpy and no torch."""

import time
from typing import Any

import numpy as np

from llama_adapter.llm.config import EngineConfig
from llama_adapter.llm.exported.numpy_sampler import choose, likeliest, log_softmax
from llama_adapter.llm.exported.program import Chosen, DecoderProgram
from llama_adapter.llm.exported.step import Step, decode_step, prefill_step
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.runners.base import (
    DecodePlan,
    MixedPlan,
    Plan,
    PrefillPlan,
    Result,
    ScorePlan,
    Scores,
    Tokens,
    WarmUp,
)
from llama_adapter.llm.runners.draw import Draw
from llama_adapter.llm.runners.score_layout import lay_out_rows


class ExportedRunner:
    """See `Runner`. Tokens are read in the step that chooses them."""

    def __init__(self, program: DecoderProgram, config: EngineConfig) -> None:
        """`program` must have at least `config.num_slots` slots, which begin with `config.past`."""
        self.config = config
        self.program = program
        self._start = config.past_length  # place at which prompts begin
        self._newest = [0] * config.num_slots  # token of each slot

    @property
    def operators_name(self) -> str:
        return self.program.name

    @property
    def runs_mixed(self) -> bool:
        return self.program.runs_mixed

    def project_prefix(self, visual_query_BQD: Any) -> list[Prefix]:
        query_BQD = np.asarray(visual_query_BQD, self.config.dtype)
        whole = self.program.project(query_BQD)
        return [Prefix(whole.k[:, row : row + 1], whole.v[:, row : row + 1]) for row in range(len(query_BQD))]

    def empty_prefix(self) -> Prefix:
        shape = self.config.decoder.prefix_shape(1)
        return Prefix(np.zeros(shape, self.config.dtype), np.zeros(shape, self.config.dtype))

    def stored_prefix(self, k_ANQH: np.ndarray, v_ANQH: np.ndarray) -> Prefix:
        return Prefix(*(part[:, None].astype(self.config.dtype) for part in (k_ANQH, v_ANQH)))

    def run(self, plan: Plan) -> Result:
        match plan:
            case DecodePlan(rows=[]):
                return Tokens((), ())
            case DecodePlan():
                return self._choose(plan, self.program.run(self._step(plan), first_slot=0))
            case PrefillPlan(first_slot=first):
                chosen = self.program.run(self._admit(plan), first_slot=first)
                return self._choose(plan, chosen, first_slot=first)
            case MixedPlan(decode, prefill):
                admitted = self._admit(prefill)
                chosen = self.program.mixed(self._step(decode), admitted, first_slot=prefill.first_slot)
                return self._choose(plan, chosen)
            case ScorePlan():
                return Scores(plan.rows, self._score(plan))

    def move(self, source: int, target: int, *, num_tokens: int) -> None:
        self.program.move(source, target, num_tokens=self._start + num_tokens)
        self._newest[target] = self._newest[source]

    def clear(self, slot: int, *, position: int | None = None) -> None:
        """Clear the whole slot for any `position`.

        No step is ever unread, so only rows that are not finite are cleared.
        """
        self.program.clear(slot)

    def reset(self) -> None:
        for slot in range(self.config.num_slots):
            self.program.clear(slot)

    def warm_up(self, *, prompt_tokens: int, new_tokens: int) -> WarmUp:
        started = time.perf_counter()
        num_slots, context = self.config.num_slots, self.config.context
        longest = min(prompt_tokens + new_tokens, context)
        rows, greedy = range(num_slots), [None] * num_slots
        prompts, prefixes = [(0,) * min(prompt_tokens, context)] * num_slots, [self.empty_prefix()] * num_slots
        self.run(PrefillPlan(rows, prompts, prefixes, greedy, first_slot=0))
        self.run(DecodePlan(rows, [longest - 1] * num_slots, greedy))
        self.reset()
        return WarmUp(seconds=time.perf_counter() - started, programs=2)

    def _admit(self, plan: PrefillPlan) -> Step:
        self.program.reserve(self._start + max(map(len, plan.prompts)))
        self.program.place(plan.prefixes, first_slot=plan.first_slot)
        return prefill_step(plan.prompts, _made_by_graph(plan), capacity=self.program.capacity, start=self._start)

    def _step(self, plan: DecodePlan) -> Step:
        self.program.reserve(self._start + max(plan.positions) + 1)
        newest, capacity = self._newest[: len(plan.rows)], self.program.capacity
        return decode_step(newest, plan.positions, _made_by_graph(plan), capacity=capacity, start=self._start)

    def _choose(self, plan: PrefillPlan | DecodePlan | MixedPlan, chosen: Chosen, *, first_slot: int = 0) -> Tokens:
        token_ids: list[int] = chosen.tokens_T.tolist()
        for row, draw in enumerate(plan.draws):
            if draw is not None and not (draw.is_plain and self.program.has_sampling):
                [token_ids[row]] = choose(chosen.logits_TV[row : row + 1], [draw])
        self._newest[first_slot : first_slot + len(token_ids)] = [max(token, 0) for token in token_ids]
        if not plan.with_logprobs:
            return Tokens(plan.rows, token_ids)
        rows = np.arange(len(token_ids))
        logprobs_TV = log_softmax(chosen.logits_TV)
        return Tokens(
            plan.rows,
            token_ids,
            logprobs_TV[rows, np.maximum(token_ids, 0)].tolist(),
            [likeliest(logprobs_V, plan.num_top) for logprobs_V in logprobs_TV] if plan.num_top else (),
        )

    def _score(self, plan: ScorePlan) -> list[list[float]]:
        most_tokens = self.config.context  # compiled graphs do not accept longer rows
        questions = [
            lay_out_rows(*question, most_tokens=most_tokens)
            for question in zip(plan.prompts, plan.continuations, strict=True)
        ]
        layouts = [layout for rows in questions for layout in rows]
        prefixes = [prefix for prefix, rows in zip(plan.prefixes, questions, strict=True) for _ in rows]
        logits_TV = self.program.score(layouts, prefixes, start=self._start)
        targets = [token for layout in layouts for token in layout.targets]
        per_token = iter(log_softmax(logits_TV)[np.arange(len(targets)), targets])
        return [
            [float(sum(next(per_token) for _ in range(length))) for layout in rows for length in layout.lengths]
            for rows in questions
        ]


def _made_by_graph(plan: PrefillPlan | DecodePlan) -> list[Draw | None]:
    """The draws that the graph makes. The others are made on the host."""
    return [draw if draw is not None and draw.is_plain else None for draw in plan.draws]
