"""The runner of exported decoders. It uses numpy and no torch."""

from functools import partial

import numpy as np

from llama_adapter.llm.config import EngineConfig
from llama_adapter.llm.exported.program import DecoderProgram, read_past
from llama_adapter.llm.exported.step import decode_step, prefill_step
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.runners.base import DecodePlan, MixedPlan, PrefillPlan, ScorePlan, to_compute
from llama_adapter.llm.runners.draw import Draw
from llama_adapter.llm.runners.host import HostRunner, Prediction, scores_of
from llama_adapter.llm.runners.score_layout import lay_out_rows


class ExportedRunner(HostRunner):
    """Runs the graphs of a decoder."""

    runs_mixed = False

    def __init__(self, program: DecoderProgram, config: EngineConfig) -> None:
        """`program` must have at least `config.num_slots` slots, which begin with `config.past`.

        Unless it `keeps_prompts`, `config.kept_places` must be 0.
        """
        super().__init__(config, dtype=config.dtype)
        self.program, self.has_sampling, self.operators_name = program, program.card.has_sampling, program.name

    def project(self, visual_query_BQD: np.ndarray) -> Prefix:
        return self.program.project(visual_query_BQD)

    def predict(self, plan: PrefillPlan | DecodePlan | MixedPlan) -> Prediction:
        program, slots, start = self.program, self.program.slots, self._start
        assert not isinstance(plan, MixedPlan), "graphs run none"
        # The graph makes these draws; the host makes the others.
        draws: list[Draw | None] = [draw if draw is not None and draw.is_plain else None for draw in plan.draws]
        if isinstance(plan, DecodePlan):
            slots.reserve(start + max(plan.positions) + 1)
            newest = self._newest[: len(plan.rows)]
            step = decode_step(newest, plan.positions, draws, capacity=slots.capacity, start=start)
            return program.run(step, first_slot=0)
        slots.reserve(start + max(map(len, plan.prompts)))
        slots.place(plan.prefixes, first_slot=plan.first_slot)
        known = self._beginnings.restore(plan, slots.write)
        step = prefill_step(
            plan.prompts, draws, capacity=slots.capacity, start=start, pictures=plan.pictures, known=known
        )
        prediction = program.run(step, first_slot=plan.first_slot)
        self._beginnings.keep(
            plan, lambda row, count: read_past(slots.cache, plan.first_slot + row, count), start=start
        )
        return prediction

    def score(self, plan: ScorePlan) -> list[list[float]]:
        before, known = self._beginnings.before(plan, self.program.slots.past)
        most_tokens = self.config.context - known  # compiled graphs do not accept longer rows
        asked = zip(plan.continuations, to_compute(plan.prompts, plan.pictures, [known] * len(plan.rows)), strict=True)
        questions = [lay_out_rows(prompt, choices, own, most_tokens=most_tokens) for choices, (prompt, own) in asked]
        # The first row of each question, then the others in parts: all rows at once may need a far larger cache than
        # the slots.
        firsts = [rows[0] for rows in questions]
        logits_TV, cache = self.program.score(firsts, plan.prefixes, before=before, keeps=any(plan.kept))
        self._beginnings.keep(plan, partial(read_past, cache), start=self._start)
        del cache
        scores = scores_of(logits_TV, firsts)
        others = [(number, layout) for number, rows in enumerate(questions) for layout in rows[1:]]
        for first in range(0, len(others), self.config.num_slots):
            numbers, layouts = zip(*others[first : first + self.config.num_slots], strict=True)
            prefixes = [plan.prefixes[number] for number in numbers]
            logits_TV, _ = self.program.score(layouts, prefixes, before=before)
            for number, more in zip(numbers, scores_of(logits_TV, layouts), strict=True):
                scores[number] += more
        return scores

    def move(self, source: int, target: int, *, num_tokens: int) -> None:
        self.program.slots.move(source, target, num_tokens=self._start + num_tokens)
        self._newest[target] = self._newest[source]

    def clear(self, slot: int, *, position: int | None = None) -> None:
        """Clear the whole slot for any `position`.

        No step is ever unread, so only rows that are not finite are cleared.
        """
        self.program.slots.clear(slot)
