"""Beginnings of prompts, whose keys and values a runner keeps for other prompts. Imports no torch."""

from collections.abc import Callable

from llama_adapter.llm.model.blocks import Past
from llama_adapter.llm.runners.base import PrefillPlan, ScorePlan


class Beginnings(dict[int, Past]):
    """Keys and values of beginnings, each after the past, by the number of their `KeptTokens`."""

    def keep(self, plan: PrefillPlan | ScorePlan, read: Callable[[int, int], Past], *, start: int) -> None:
        """Keep what a plan says, and release what it drops.

        `read` copies the first places of a row of the plan. `start` is the length of the past.
        """
        for number in plan.dropped:
            self.pop(number, None)
        for row, tokens in enumerate(plan.kept):
            if tokens is not None and not tokens.is_known and tokens.number not in plan.dropped:
                self[tokens.number] = read(row, start + tokens.num_tokens)

    def restore(self, plan: PrefillPlan, write: Callable[[int, Past], None]) -> list[int]:
        """Write what is kept of each prompt into its slot, and return how many of its tokens are there then."""
        known = [0] * len(plan.prompts)
        for row, tokens in enumerate(plan.kept):
            if tokens is not None and tokens.is_known:
                write(plan.first_slot + row, self[tokens.number])
                known[row] = tokens.num_tokens
        return known

    def before(self, plan: ScorePlan, past: Past | None) -> tuple[Past | None, int]:
        """The keys and values before all prompts of a plan, and how many of their tokens these have beside the past."""
        first = plan.kept[0] if plan.kept else None
        return (past, 0) if first is None or not first.is_known else (self[first.number], first.num_tokens)
