"""Compares two models on the same examples.

The test is McNemar, "Note on the sampling error of the difference between correlated proportions" (1947), in its exact
form: of the examples that only one model answers right, each model has half on average if both are equally good.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llama_adapter.app.learning.scores.choices import Flags
from llama_adapter.app.learning.scores.intervals import Draws, Figure, at_most, figures
from llama_adapter.app.learning.scores.outcome import Ints, Outcome, Task, picture_groups, task_of
from llama_adapter.app.learning.scores.scoring import measure_outcomes


@dataclass(frozen=True, kw_only=True, slots=True)
class McNemar:
    """Counts of right answers of two models, and the two-sided exact p-value, which assumes independent examples."""

    num_both_right: int
    num_one_right: int  # examples that only the first model answers right
    num_other_right: int  # examples that only the second model answers right
    num_both_wrong: int
    p_value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The scores of a second model minus those of a first one."""

    names: tuple[str, str]
    task: Task
    num_examples: int
    num_pictures: int
    draws: Draws
    values: dict[str, tuple[float | None, float | None]]  # name of a metric -> values of both models
    differences: dict[str, Figure]  # intervals from bootstrap draws of the same pictures for both models
    mcnemar: McNemar | None  # None for captions, which are not right or wrong
    note: str = ""  # a sentence on other differences, for the reports


def compare(
    one: Sequence[Outcome],
    other: Sequence[Outcome],
    *,
    names: tuple[str, str] = ("first", "second"),
    task: Task | None = None,
    draws: Draws | None = None,
    note: str = "",
) -> Comparison:
    """Compare two models, whose outcomes are of the same examples in the same order. `note` is for the reports.

    Raises ValueError if the examples differ: picture, question, part and right answers.
    """
    draws = draws or Draws()
    task = task or task_of(one)
    if [outcome.example_key for outcome in one] != [outcome.example_key for outcome in other]:
        raise ValueError("the outcomes are not of the same examples in the same order")
    groups_N = picture_groups(one)
    mine, theirs = measure_outcomes(task, one), measure_outcomes(task, other)

    def both(chosen: Ints) -> dict[str, tuple[float | None, float | None]]:
        """The metrics that both models have."""
        before, after = mine.statistics(chosen), theirs.statistics(chosen)
        return {name: (value, after[name]) for name, value in before.items() if name in after}

    def difference(chosen: Ints) -> dict[str, float | None]:
        return {name: None if old is None or new is None else new - old for name, (old, new) in both(chosen).items()}

    return Comparison(
        names=names,
        task=task,
        num_examples=len(one),
        num_pictures=len(np.unique(groups_N)),
        draws=draws,
        values=both(np.arange(len(one))),
        differences=figures(difference, groups_N, draws),
        mcnemar=_mcnemar(mine.is_right_N, theirs.is_right_N),
        note=note,
    )


def mcnemar_p(num_one_right: int, num_other_right: int) -> float:
    """The two-sided exact p-value for the numbers of examples that only one model answers right; 1 if both are 0."""
    return min(1.0, 2.0 * at_most(min(num_one_right, num_other_right), num_one_right + num_other_right, 0.5))


def _mcnemar(one: Flags | None, other: Flags | None) -> McNemar | None:
    if one is None or other is None:
        return None
    only_one, only_other = int((one & ~other).sum()), int((other & ~one).sum())
    return McNemar(
        num_both_right=int((one & other).sum()),
        num_one_right=only_one,
        num_other_right=only_other,
        num_both_wrong=int((~one & ~other).sum()),
        p_value=mcnemar_p(only_one, only_other),
    )
