"""All metrics of a set of outcomes: overall, by part and by class; and the worst answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from llama_adapter.app.learning.scores.answers import answer_scores
from llama_adapter.app.learning.scores.captions import caption_figures, caption_scores
from llama_adapter.app.learning.scores.choices import (
    Choices,
    Confusion,
    Flags,
    choice_figures,
    class_figures,
    class_intervals,
    confusion,
    part_figures,
    read_choices,
)
from llama_adapter.app.learning.scores.intervals import Draws, Figure, Statistics, figures, means, wilson_interval
from llama_adapter.app.learning.scores.outcome import Floats, Ints, Outcome, Task, picture_groups, task_of

ALL_PARTS: Final = "(all)"
NO_PART: Final = "(none)"
NUM_WORST: Final = 24
SHARES: Final = ("accuracy", "exact", "normalised")  # of right answers

# MME's parts, by the names of its folders. Fu et al. (2023), section 2.2.
MME_PERCEPTION: Final = (
    *("existence", "count", "position", "color", "posters"),
    *("celebrity", "scene", "landmark", "artwork", "OCR"),
)
MME_COGNITION: Final = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """An answer that is wrong, or not as good as others."""

    outcome: Outcome
    score: float  # score of this answer: 0 to 1; CIDEr-D for captions, 0 to 10
    confidence: float | None  # the probability of the most probable choice


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The scores of one model's answers."""

    model: str
    task: Task
    num_examples: int
    num_pictures: int  # an example without picture counts as one
    draws: Draws
    figures: dict[str, Figure]
    parts: dict[str, dict[str, Figure]]  # by part, `(all)` first; empty if there are no parts and no yes/no questions
    classes: dict[str, dict[str, Figure]]  # by class; empty if the examples have different choices
    confusion: Confusion | None
    totals: dict[str, float]  # MME's sums over its parts, if all parts are present
    worst: tuple[Mistake, ...]
    notes: tuple[str, ...] = ()  # sentences on data and model for the reports; includes the hint
    hint: str | None = None  # a recommendation that follows from the metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Outcomes of one task, prepared once for computing metrics."""

    statistics: Statistics[str]
    part_statistics: Statistics[str]
    score_N: Floats  # score of each answer, as in `Mistake`
    order_N: Ints  # indices of the outcomes, the worst first
    is_right_N: Flags | None = None  # None for captions, which are not right or wrong
    choices: Choices | None = None  # None for other tasks


def measure_outcomes(task: Task, outcomes: Sequence[Outcome]) -> Measured:
    """Prepare outcomes. Raises UsageError if the right answer to a question with choices is not a choice."""
    if task == "choices":
        table = read_choices(outcomes)
        score_N = table.is_right_N.astype(np.float64)
        sure_N = np.zeros_like(score_N) if table.sureness is None else table.sureness.highest_N
        return Measured(
            statistics=partial(choice_figures, table),
            part_statistics=partial(part_figures, table),
            score_N=score_N,
            order_N=np.lexsort((-sure_N, score_N)),
            is_right_N=table.is_right_N,
            choices=table,
        )
    if task == "open":
        found = answer_scores(outcomes)
        score_N = found.get("VQA", found["normalised"])
        return Measured(
            statistics=means(found),
            part_statistics=means(found),
            score_N=score_N,
            order_N=np.argsort(score_N, kind="stable"),
            is_right_N=found["normalised"] > 0,
        )
    captions = caption_scores(outcomes)
    return Measured(
        statistics=partial(caption_figures, captions),
        part_statistics=partial(caption_figures, captions),
        score_N=captions.cider_N,
        order_N=np.lexsort((captions.rouge_N, captions.cider_N)),
    )


def score(
    outcomes: Sequence[Outcome],
    *,
    model: str = "",
    task: Task | None = None,
    draws: Draws | None = None,
    notes: tuple[str, ...] = (),
) -> Scores:
    """All metrics of one model. By default the data determine `task`. `notes` are sentences for the reports.

    Raises UsageError if there are no outcomes, or the right answer to a question with choices is not a choice.
    """
    task, draws = task or task_of(outcomes), draws or Draws()
    groups_N = picture_groups(outcomes)
    measured = measure_outcomes(task, outcomes)
    parts = _parts(measured, outcomes, groups_N, draws)
    table = measured.choices
    found = _overall(measured.statistics, groups_N, draws)
    hint = threshold_hint(found, num_classes=len(table.classes or ()) if table else 0)
    return Scores(
        model=model,
        task=task,
        num_examples=len(outcomes),
        num_pictures=len(np.unique(groups_N)),
        draws=draws,
        figures=found,
        parts=parts,
        classes=_classes(table, groups_N, draws) if table else {},
        confusion=confusion(table) if table else None,
        totals=_totals(parts),
        worst=_worst(measured, outcomes),
        notes=notes if hint is None else (*notes, hint),
        hint=hint,
    )


def _parts(
    measured: Measured, outcomes: Sequence[Outcome], groups_N: Ints, draws: Draws
) -> dict[str, dict[str, Figure]]:
    places: dict[str, list[int]] = {}
    for place, one in enumerate(outcomes):
        places.setdefault(one.part, []).append(place)
    is_divided = places.keys() != {""}
    if not is_divided and (measured.choices is None or measured.choices.yes is None):
        return {}
    found = {ALL_PARTS: _overall(measured.part_statistics, groups_N, draws)}
    for name, given in places.items() if is_divided else ():
        own = np.array(given, dtype=np.int64)
        found[name or NO_PART] = _overall(_of(measured.part_statistics, own), groups_N[own], draws)
    if is_divided:
        found[ALL_PARTS].pop("MME score", None)  # MME sums the scores of parts, and defines no score for all questions
    return found


def _overall(statistics: Statistics[str], groups_N: Ints, draws: Draws) -> dict[str, Figure]:
    """The figures with bootstrap intervals. If all draws give the same value, they do not show how sure it is.

    Then shares of right answers of 0 or 1 have Wilson's interval for the number of pictures, and others have none.
    """
    found, num_pictures = figures(statistics, groups_N, draws), len(np.unique(groups_N))
    for name, one in found.items():
        if one.low is not None and one.low == one.high:
            is_limit = name in SHARES and one.value in (0.0, 1.0)
            ends = wilson_interval(num_pictures * int(one.value or 0), num_pictures) if is_limit else (None, None)
            found[name] = replace(one, low=ends[0], high=ends[1])
    return found


def _of(statistics: Statistics[str], own: Ints) -> Statistics[str]:
    """The same metrics for a part of the examples; `own` has the indices of these."""
    return lambda chosen: statistics(own[chosen])


def _classes(table: Choices, groups_N: Ints, draws: Draws) -> dict[str, dict[str, Figure]]:
    """The figures of each class, if all examples have the same choices, with Wilson's intervals.

    The bootstrap's intervals have width 0 for one example. Wilson's interval takes examples as independent. If pictures
    have several, the interval spans the bootstrap's too.
    """
    if table.classes is None:
        return {}
    found: dict[str, dict[str, Figure]] = {name: {} for name in table.classes}
    intervals, has_sets = class_intervals(table), len(np.unique(groups_N)) < len(groups_N)
    for (one, name), figure in figures(partial(class_figures, table), groups_N, draws).items():
        index = table.classes.index(one)
        low, high = figure.low, figure.high
        if low is not None and high is not None:
            wilson_low, wilson_high = intervals[one, name]
            low, high = (min(low, wilson_low), max(high, wilson_high)) if has_sets else (wilson_low, wilson_high)
        found[one][name] = replace(figure, low=low, high=high, count=int((table.label_N == index).sum()))
    return found


def _totals(parts: Mapping[str, Mapping[str, Figure]]) -> dict[str, float]:
    scores = {name: own["MME score"].value or 0.0 for name, own in parts.items() if "MME score" in own}
    return {
        name: sum(scores[part] for part in needed)
        for name, needed in (("perception", MME_PERCEPTION), ("cognition", MME_COGNITION))
        if all(part in scores for part in needed)
    }


def _worst(measured: Measured, outcomes: Sequence[Outcome]) -> tuple[Mistake, ...]:
    """Wrong answers, the highest confidence first; captions by CIDEr-D, then ROUGE-L. Ties keep their order."""
    is_caption = measured.is_right_N is None
    order = [place for place in measured.order_N.tolist() if is_caption or measured.score_N[place] < 1.0]
    return tuple(
        Mistake(
            outcome=outcomes[place],
            score=float(measured.score_N[place]),
            confidence=max(outcomes[place].probabilities or (), default=None),
        )
        for place in order[:NUM_WORST]
    )


# Two normal distributions with equal variances have a ROC-AUC of A = Φ(d / √2), and the best threshold between them
# has a balanced accuracy of Φ(d / 2). The difference is at most 0.084. If it is greater, the threshold is bad.
LEAST_GAP: Final = 0.15


def threshold_hint(figures: Mapping[str, Figure], *, num_classes: int) -> str | None:
    """A sentence that recommends calibration, if another threshold between two choices would be right much more often.

    This is the case if the ROC-AUC exceeds the balanced accuracy by `LEAST_GAP` or more. With more than two choices, a
    calibration does not change the most probable choice, so the result is None.
    """
    area, share = (figures[name].value if name in figures else None for name in ("ROC-AUC", "balanced accuracy"))
    if num_classes != 2 or area is None or share is None or area - share < LEAST_GAP:
        return None
    return (
        f"The balanced accuracy is {share:.1%}, and a ROC-AUC of {area:.3f} says that another threshold between the "
        "two choices would be right more often. `llama-adapter ask --calibrate` finds it with labelled pictures that "
        "were not learned: see docs/choices.md."
    )
