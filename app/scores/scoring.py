"""All figures of a set of outcomes: overall, by part and by class, and which answers are the worst."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llama_adapter.app.scores.answers import answer_scores, answer_statistics
from llama_adapter.app.scores.captions import caption_scores, caption_statistics
from llama_adapter.app.scores.choices import (
    Confusion,
    choice_statistics,
    class_statistics,
    confusion,
    part_statistics,
    read_choices,
)
from llama_adapter.app.scores.intervals import Draws, Figure, Statistic, figures
from llama_adapter.app.scores.outcome import Outcome, Task, picture_groups, task_of

ALL_PARTS: Final = "all"
NUM_WORST: Final = 24

# MME's parts, Fu et al. (2023), section 2.2; names of its folders.
MME_PERCEPTION: Final = (
    *("existence", "count", "position", "color", "posters"),
    *("celebrity", "scene", "landmark", "artwork", "OCR"),
)
MME_COGNITION: Final = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """An answer that is wrong, or not as good as others."""

    outcome: Outcome
    score: float  # of this answer: 0 to 1; CIDEr-D for captions, 0 to 10
    confidence: float | None  # the probability of the likeliest choice


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """How good one model's answers are."""

    model: str
    task: Task
    num_examples: int
    num_pictures: int  # a text alone counts as one
    draws: Draws
    figures: dict[str, Figure]
    parts: dict[str, dict[str, Figure]]  # by part, with `all` first; empty without parts and questions of yes or no
    classes: dict[str, dict[str, Figure]]  # by class; empty where the examples have no common choices
    confusion: Confusion | None
    totals: dict[str, float]  # MME's sums over its parts, where all are there
    worst: tuple[Mistake, ...]


def score(
    outcomes: Sequence[Outcome],
    *,
    model: str = "",
    task: Task | None = None,
    draws: Draws | None = None,
    num_worst: int = NUM_WORST,
) -> Scores:
    """All figures of one model. `task` is found by the data if it is not given.

    Raises UsageError without outcomes, and if the right answer of a choice is none of the choices.
    """
    task, draws = task or task_of(outcomes), draws or Draws()
    groups_N = picture_groups(outcomes)
    parts = _parts(task, outcomes, draws)
    classes: dict[str, dict[str, Figure]] = {}
    table = read_choices(outcomes) if task == "choices" else None
    for index, name in enumerate((table and table.classes) or ()):
        assert table is not None
        found = figures(class_statistics(table, index), groups_N, draws)
        count = int((table.label_N == index).sum())
        classes[name] = {key: _counted(figure, count) for key, figure in found.items()}
    return Scores(
        model=model,
        task=task,
        num_examples=len(outcomes),
        num_pictures=len(np.unique(groups_N)),
        draws=draws,
        figures=figures(statistics_of(task, outcomes), groups_N, draws),
        parts=parts,
        classes=classes,
        confusion=confusion(table) if table else None,
        totals=_totals(parts),
        worst=_worst(task, outcomes, num_worst),
    )


def statistics_of(task: Task, outcomes: Sequence[Outcome]) -> dict[str, Statistic]:
    """The figures of a task by name."""
    if task == "choices":
        return choice_statistics(read_choices(outcomes))
    return answer_statistics(outcomes) if task == "open" else caption_statistics(caption_scores(outcomes))


def is_right(task: Task, outcomes: Sequence[Outcome]) -> NDArray[np.bool_]:
    """Whether each answer is right, (N,): open answers after normalisation."""
    if task == "choices":
        return read_choices(outcomes).right_N
    return answer_scores(outcomes)["normalised"] > 0


def _parts(task: Task, outcomes: Sequence[Outcome], draws: Draws) -> dict[str, dict[str, Figure]]:
    names = list(dict.fromkeys(one.part for one in outcomes))
    given = {name or "(none)": [one for one in outcomes if one.part == name] for name in names}
    if len(names) < 2 and not any(names):
        given = {}
    if given or (task == "choices" and read_choices(outcomes).positive is not None):
        given = {ALL_PARTS: list(outcomes), **given}
    found = {name: _part(task, own, draws) for name, own in given.items()}
    if len(found) > 1:
        found[ALL_PARTS].pop("MME score", None)  # MME adds the scores of parts; it has no score of all questions
    return found


def _part(task: Task, outcomes: Sequence[Outcome], draws: Draws) -> dict[str, Figure]:
    statistics = part_statistics(read_choices(outcomes)) if task == "choices" else statistics_of(task, outcomes)
    return figures(statistics, picture_groups(outcomes), draws)


def _counted(figure: Figure, count: int) -> Figure:
    return Figure(value=figure.value, low=figure.low, high=figure.high, count=count)


def _totals(parts: Mapping[str, Mapping[str, Figure]]) -> dict[str, float]:
    scores = {name: own["MME score"].value or 0.0 for name, own in parts.items() if "MME score" in own}
    return {
        name: sum(scores[part] for part in needed)
        for name, needed in (("perception", MME_PERCEPTION), ("cognition", MME_COGNITION))
        if all(part in scores for part in needed)
    }


def _worst(task: Task, outcomes: Sequence[Outcome], count: int) -> tuple[Mistake, ...]:
    """Wrong answers with the surest first; captions by CIDEr-D, then ROUGE-L. Equal ones stay in order."""
    if task == "captions":
        captions = caption_scores(outcomes)
        order = np.lexsort((captions.rouge_N, captions.cider_N))
        return tuple(_mistake(outcomes[place], float(captions.cider_N[place])) for place in order[:count])
    if task == "open":
        found = answer_scores(outcomes)
        score_N = found.get("VQA", found["normalised"])
    else:
        score_N = read_choices(outcomes).right_N.astype(np.float64)
    mistakes = [_mistake(one, float(value)) for one, value in zip(outcomes, score_N, strict=True) if value < 1.0]
    return tuple(sorted(mistakes, key=lambda one: (one.score, -(one.confidence or 0.0)))[:count])


def _mistake(outcome: Outcome, value: float) -> Mistake:
    return Mistake(outcome=outcome, score=value, confidence=max(outcome.probabilities or (), default=None))
