"""Metrics of answers from a fixed set of choices. N examples, C choices, M drawn examples, S sets of questions.

POPE's table is from Li et al., "Evaluating Object Hallucination in Large Vision-Language Models" (2023); accuracy+ and
the score of a part from Fu et al., "MME: A Comprehensive Evaluation Benchmark for Multimodal Large Language Models"
(2023). ROC-AUC of several classes is the mean over the classes, each against the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llama_adapter.app.captioning.decisions.measures import calibration_error
from llama_adapter.app.learning.scores.intervals import wilson_interval
from llama_adapter.app.learning.scores.outcome import YES_NO, Floats, Ints, Outcome, picture_groups
from llama_adapter.runtime.errors import UsageError

Flags = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sureness:
    """The values of the choices' probabilities that metrics need."""

    rank_NC: Ints  # rank of each probability among all examples, per choice; equal probabilities have the same rank
    highest_N: Floats  # the probability of the most probable choice
    is_right_N: Flags  # whether the most probable choice is right


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """Outcomes as arrays. If all have the same choices, these are the classes, in the order of the first outcome."""

    classes: tuple[str, ...] | None
    label_N: Ints
    answer_N: Ints  # -1: the answer names no choice
    is_right_N: Flags
    sureness: Sureness | None  # None unless all outcomes have probabilities
    set_N: Ints  # number of each question's set: a set has the questions of one picture in one part

    @property
    def yes(self) -> int | None:
        """The index of `yes`, if the classes are yes and no; otherwise None."""
        names = [name.strip().casefold() for name in self.classes or ()]
        return names.index("yes") if len(names) == 2 and set(names) == YES_NO else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Confusion:
    """A confusion matrix: a row for each right answer, a column for each given answer."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]  # the last one may be `(other)`, answers that name no choice
    counts: tuple[tuple[int, ...], ...]


def read_choices(outcomes: Sequence[Outcome]) -> Choices:
    """Outcomes as arrays. Raises UsageError if an outcome has no choices, or its right answer is not among them."""
    if not outcomes or any(one.choices is None for one in outcomes):
        raise UsageError("Wanted choices for all examples, but some have none")
    first = outcomes[0].choices or ()
    classes = first if all(sorted(one.choices or ()) == sorted(first) for one in outcomes) else None
    label_N = np.zeros(len(outcomes), dtype=np.int64)
    answer_N = np.full(len(outcomes), -1, dtype=np.int64)
    # Examples with fewer choices are padded with zeros.
    probabilities_NC = np.zeros((len(outcomes), max(len(one.choices or ()) for one in outcomes)))
    class_places = {name: index for index, name in enumerate(classes or ())}
    for index, one in enumerate(outcomes):
        own = one.choices or ()
        place = [class_places[choice] for choice in own] if classes else list(range(len(own)))
        named = one.chosen(one.answer)
        label_N[index] = place[one.label]
        if named is not None:
            answer_N[index] = place[named]
            if named in map(one.chosen, one.references):  # of several right choices, each is right
                label_N[index] = place[named]
        if one.probabilities is not None:
            probabilities_NC[index, place] = one.probabilities
    sureness = None
    if all(one.probabilities is not None for one in outcomes):
        sureness = Sureness(
            rank_NC=np.stack([ranks(column_N) for column_N in probabilities_NC.T], axis=1),
            highest_N=probabilities_NC.max(axis=1),
            is_right_N=probabilities_NC.argmax(axis=1) == label_N,
        )
    sets: dict[tuple[int, str], int] = {}
    keys = zip(picture_groups(outcomes).tolist(), (one.part for one in outcomes), strict=True)
    return Choices(
        classes=classes,
        label_N=label_N,
        answer_N=answer_N,
        is_right_N=answer_N == label_N,
        sureness=sureness,
        set_N=np.array([sets.setdefault(key, len(sets)) for key in keys], dtype=np.int64),
    )


def choice_figures(table: Choices, chosen: Ints) -> dict[str, float | None]:
    """Name -> metric for the `chosen` examples, at least one. Has only metrics that the data allow."""
    found: dict[str, float | None] = {"accuracy": float(table.is_right_N[chosen].mean())}
    if table.classes is not None:
        shares = class_shares(answer_counts(table, chosen))
        found["balanced accuracy"] = _mean_defined(shares["recall"])
        found["macro F1"] = _mean_defined(shares["F1"])
    if table.sureness is not None:
        if table.classes is not None:
            found["ROC-AUC"] = mean_roc_auc(table.sureness.rank_NC, table.label_N, chosen)
        found["ECE"] = calibration_error(table.sureness.highest_N[chosen], table.sureness.is_right_N[chosen])
    return found


def class_figures(table: Choices, chosen: Ints) -> dict[tuple[str, str], float | None]:
    """(class, name) -> precision, recall or F1, for examples with the same choices."""
    shares = class_shares(answer_counts(table, chosen))
    return {
        (one, name): _defined(share_C[index])
        for index, one in enumerate(table.classes or ())
        for name, share_C in shares.items()
    }


def part_figures(table: Choices, chosen: Ints) -> dict[str, float | None]:
    """The metrics of one part: those of POPE for yes and no, and those of MME if pictures have several questions."""
    accuracy = float(table.is_right_N[chosen].mean())
    found: dict[str, float | None] = {"accuracy": accuracy}
    if table.yes is None:
        return found
    shares = class_shares(answer_counts(table, chosen))
    found |= {name: _defined(share_C[table.yes]) for name, share_C in shares.items()}
    found["share of yes"] = float((table.answer_N[chosen] == table.yes).mean())
    if len(table.set_N) > len(np.unique(table.set_N)):  # a picture has several questions
        plus = found["accuracy+"] = accuracy_plus(table, chosen)
        found["MME score"] = 100.0 * (accuracy + plus)
    return found


def answer_counts(table: Choices, chosen: Ints) -> Ints:
    """Counts (C, C + 1): rows are right answers, columns are given answers, the last for those that name no choice."""
    num_classes = len(table.classes or ())
    columns = num_classes + 1
    answer_M = np.where(table.answer_N[chosen] < 0, num_classes, table.answer_N[chosen])
    counted = np.bincount(table.label_N[chosen] * columns + answer_M, minlength=num_classes * columns)
    return counted.reshape(num_classes, columns).astype(np.int64)


def class_shares(counts: Ints) -> dict[str, Floats]:
    """Precision, recall and F1 of each class, (C,), from `answer_counts`; NaN if undefined.

    Precision is undefined for a class that is never given as an answer, recall for a class that is never right, and F1,
    2 TP / (2 TP + FP + FN), for a class that is neither.
    """
    hits_C = np.diagonal(counts).astype(np.float64)
    given_C, right_C = counts[:, :-1].sum(axis=0), counts.sum(axis=1)
    with np.errstate(invalid="ignore"):
        return {"precision": hits_C / given_C, "recall": hits_C / right_C, "F1": 2 * hits_C / (given_C + right_C)}


def class_intervals(table: Choices) -> dict[tuple[str, str], tuple[float, float]]:
    """(class, name) -> Wilson's 95 % interval of precision, recall or F1, of independent examples; 0 to 1 if undefined.

    F1 is 2 J / (1 + J), where J is the share of hits among the examples that are of the class or get it as the answer.
    """
    found = {}
    counts = answer_counts(table, np.arange(len(table.label_N)))
    for index, one in enumerate(table.classes or ()):
        hits, given, right = int(counts[index, index]), int(counts[:, index].sum()), int(counts[index].sum())
        found[one, "precision"] = wilson_interval(hits, given)
        found[one, "recall"] = wilson_interval(hits, right)
        low, high = wilson_interval(hits, given + right - hits)
        found[one, "F1"] = 2 * low / (1 + low), 2 * high / (1 + high)
    return found


def confusion(table: Choices) -> Confusion | None:
    """The confusion matrix; None if the choices differ between examples."""
    if table.classes is None:
        return None
    counts = answer_counts(table, np.arange(len(table.label_N)))
    has_other = bool(counts[:, -1].any())
    return Confusion(
        rows=table.classes,
        columns=(*table.classes, "(other)") if has_other else table.classes,
        counts=tuple(tuple(map(int, row if has_other else row[:-1])) for row in counts),
    )


def accuracy_plus(table: Choices, chosen: Ints) -> float:
    """MME's accuracy+: the share of pictures whose questions are all answered right.

    A picture that was drawn several times counts several times.
    """
    size_S = np.bincount(table.set_N)
    asked_S = np.bincount(table.set_N[chosen], minlength=len(size_S))
    wrong_S = np.bincount(table.set_N[chosen][~table.is_right_N[chosen]], minlength=len(size_S))
    times_S = asked_S / size_S
    return float(times_S[wrong_S == 0].sum() / times_S.sum())


def roc_auc(rank_M: Ints, is_positive_M: Flags) -> float | None:
    """The area under the ROC curve (Hanley and McNeil, 1982); None without positive or without negative examples.

    It is the probability that a positive example has a higher rank than a negative one, where ties count half. Ranks
    are integers from 0.
    """
    num_positive = int(is_positive_M.sum())
    num_pairs = num_positive * (len(rank_M) - num_positive)
    if not num_pairs:
        return None
    all_R = np.bincount(rank_M)
    lower_R = np.cumsum(all_R) - all_R / 2
    # Of the pairs of two positive examples, which are not meant, half have the lower one first.
    return float((lower_R[rank_M[is_positive_M]].sum() - num_positive**2 / 2) / num_pairs)


def mean_roc_auc(rank_NC: Ints, label_N: Ints, chosen: Ints) -> float | None:
    """ROC-AUC of two classes, or the mean over each class against the rest; None if a class has no `chosen` example."""
    label_M, num_classes = label_N[chosen], rank_NC.shape[1]
    if num_classes < 2 or len(np.unique(label_M)) < num_classes:
        return None
    indices = [1] if num_classes == 2 else range(num_classes)
    return float(np.mean([roc_auc(rank_NC[chosen, index], label_M == index) for index in indices]))


def ranks(values_N: Floats) -> Ints:
    """The rank of each value from 0; equal values have one rank."""
    return np.unique(values_N, return_inverse=True)[1].astype(np.int64)


def _defined(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _mean_defined(shares_C: Floats) -> float | None:
    return None if np.isnan(shares_C).all() else float(np.nanmean(shares_C))
