"""Figures of answers that are one of a fixed set. N examples, C choices.

POPE's table is from Li et al., "Evaluating Object Hallucination in Large Vision-Language Models" (2023); accuracy+ and
the score of a part from Fu et al., "MME: A Comprehensive Evaluation Benchmark for Multimodal Large Language Models"
(2023). ROC-AUC of several classes is the mean over one class against the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llama_adapter.app.calibration.measures import measure
from llama_adapter.app.scores.intervals import Statistic, mean_of
from llama_adapter.app.scores.outcome import YES_NO, Floats, Ints, Outcome, picture_groups
from llama_adapter.runtime.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """Outcomes as arrays. Where all have the same choices these are classes, in the order of the first outcome."""

    classes: tuple[str, ...] | None
    label_N: Ints
    answer_N: Ints  # -1: the answer names no choice
    probabilities_NC: Floats | None  # a smaller number of choices is filled up with zeros
    group_N: Ints  # numbers of the pictures

    @property
    def right_N(self) -> NDArray[np.bool_]:
        """Whether each answer is right."""
        found: NDArray[np.bool_] = self.answer_N == self.label_N
        return found

    @property
    def positive(self) -> int | None:
        """The index of `yes` among yes and no."""
        names = [name.strip().casefold() for name in self.classes or ()]
        return names.index("yes") if len(names) == 2 and set(names) == YES_NO else None

    @property
    def has_sets(self) -> bool:
        """Whether a picture has several questions."""
        return len(self.group_N) > len(np.unique(self.group_N))


@dataclass(frozen=True, kw_only=True, slots=True)
class Confusion:
    """Counts: a row for each right answer, a column for each given answer."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]  # the last one may be `(other)`, answers that name no choice
    counts: tuple[tuple[int, ...], ...]


def read_choices(outcomes: Sequence[Outcome]) -> Choices:
    """Raises UsageError if the right answer of an outcome is none of its choices."""
    first = outcomes[0].choices
    if first is None or any(one.choices is None for one in outcomes):
        raise UsageError("Wanted choices for all examples, but some have none")
    classes = first if all(sorted(one.choices or ()) == sorted(first) for one in outcomes) else None
    num_choices = max(len(one.choices or ()) for one in outcomes)
    label_N = np.zeros(len(outcomes), dtype=np.int64)
    answer_N = np.zeros(len(outcomes), dtype=np.int64)
    probabilities_NC = np.zeros((len(outcomes), num_choices))
    for index, one in enumerate(outcomes):
        own = one.choices or ()
        place = [classes.index(choice) for choice in own] if classes else list(range(len(own)))
        named = one.chosen(one.answer)
        label_N[index] = place[one.label]
        answer_N[index] = -1 if named is None else place[named]
        if one.probabilities is not None:
            probabilities_NC[index, place] = one.probabilities
    has_all = all(one.probabilities is not None for one in outcomes)
    return Choices(
        classes=classes,
        label_N=label_N,
        answer_N=answer_N,
        probabilities_NC=probabilities_NC if has_all else None,
        group_N=picture_groups(outcomes),
    )


def choice_statistics(table: Choices) -> dict[str, Statistic]:
    """The figures of all examples by name, those that the examples allow."""
    right_N = table.right_N.astype(np.float64)
    found: dict[str, Statistic] = {"accuracy": mean_of(right_N)}
    if table.classes is not None:
        found["balanced accuracy"] = lambda chosen: balanced_accuracy(table, chosen)
        found["macro F1"] = lambda chosen: macro_f1(table, chosen)
    probabilities_NC = table.probabilities_NC
    if probabilities_NC is not None:
        if table.classes is not None:
            found["ROC-AUC"] = lambda chosen: mean_roc_auc(probabilities_NC[chosen], table.label_N[chosen])
        found["ECE"] = lambda chosen: measure(probabilities_NC[chosen], table.label_N[chosen]).ece
    return found


def class_statistics(table: Choices, index: int) -> dict[str, Statistic]:
    """Precision, recall and F1 of one class."""
    return {
        "precision": lambda chosen: precision(table, index, chosen),
        "recall": lambda chosen: recall(table, index, chosen),
        "F1": lambda chosen: f1(table, index, chosen),
    }


def part_statistics(table: Choices) -> dict[str, Statistic]:
    """The figures of one part: POPE's row for yes and no, accuracy+ where pictures have several questions."""
    right_N = table.right_N.astype(np.float64)
    found: dict[str, Statistic] = {"accuracy": mean_of(right_N)}
    yes = table.positive
    if yes is not None:
        found |= class_statistics(table, yes)
        found["share of yes"] = mean_of((table.answer_N == yes).astype(np.float64))
        if table.has_sets:
            found["accuracy+"] = lambda chosen: accuracy_plus(table, chosen)
            found["MME score"] = lambda chosen: mme_score(table, chosen)
    return found


def confusion(table: Choices) -> Confusion | None:
    """Counts of right and given answers; None where the choices differ between examples."""
    if table.classes is None:
        return None
    num_classes = len(table.classes)
    counts = np.zeros((num_classes, num_classes + 1), dtype=np.int64)
    np.add.at(counts, (table.label_N, table.answer_N), 1)  # -1 is the last column
    has_other = bool(counts[:, -1].any())
    return Confusion(
        rows=table.classes,
        columns=(*table.classes, "(other)") if has_other else table.classes,
        counts=tuple(tuple(map(int, row if has_other else row[:-1])) for row in counts),
    )


def precision(table: Choices, index: int, chosen: Ints) -> float | None:
    """The share of right ones among the answers of a class; None without such answers."""
    is_answer = table.answer_N[chosen] == index
    return float((table.label_N[chosen][is_answer] == index).mean()) if is_answer.any() else None


def recall(table: Choices, index: int, chosen: Ints) -> float | None:
    """The share of a class's examples that is answered right; None without such examples."""
    is_label = table.label_N[chosen] == index
    return float((table.answer_N[chosen][is_label] == index).mean()) if is_label.any() else None


def f1(table: Choices, index: int, chosen: Ints) -> float | None:
    """2 TP / (2 TP + FP + FN); None for a class that is neither right nor given."""
    is_answer, is_label = table.answer_N[chosen] == index, table.label_N[chosen] == index
    total = int(is_answer.sum()) + int(is_label.sum())
    return 2 * int((is_answer & is_label).sum()) / total if total else None


def balanced_accuracy(table: Choices, chosen: Ints) -> float | None:
    """The mean recall of the classes that occur."""
    found = (recall(table, index, chosen) for index in range(len(table.classes or ())))
    return _mean([value for value in found if value is not None])


def macro_f1(table: Choices, chosen: Ints) -> float | None:
    """The mean F1 of the classes that are right or given somewhere."""
    found = (f1(table, index, chosen) for index in range(len(table.classes or ())))
    return _mean([value for value in found if value is not None])


def accuracy_plus(table: Choices, chosen: Ints) -> float | None:
    """MME's accuracy+: the share of pictures whose questions are all answered right.

    A picture that was drawn several times counts as often.
    """
    if not len(chosen):
        return None
    groups_M, right_M = table.group_N[chosen], table.right_N[chosen]
    size_G = np.bincount(table.group_N)  # questions of each picture
    asked_G = np.bincount(groups_M, minlength=len(size_G))
    wrong_G = np.bincount(groups_M[~right_M], minlength=len(size_G))
    times_G = asked_G / np.maximum(size_G, 1)
    return float(times_G[wrong_G == 0].sum() / times_G.sum())


def mme_score(table: Choices, chosen: Ints) -> float | None:
    """MME's score of a part: accuracy and accuracy+ in per cent, added; 0 to 200."""
    plus = accuracy_plus(table, chosen)
    return None if plus is None else 100.0 * (float(table.right_N[chosen].mean()) + plus)


def roc_auc(score_N: Floats, is_positive_N: NDArray[np.bool_]) -> float | None:
    """The probability that a positive example has the higher score, ties counted half; None without both kinds.

    This is the area under the ROC curve (Hanley and McNeil, 1982).
    """
    num_positive = int(is_positive_N.sum())
    num_negative = len(is_positive_N) - num_positive
    if not num_positive or not num_negative:
        return None
    _, inverse_N, count_U = np.unique(score_N, return_inverse=True, return_counts=True)
    rank_U = np.cumsum(count_U) - (count_U - 1) / 2  # the mean rank of equal scores
    rank_sum = float(rank_U[inverse_N[is_positive_N]].sum())
    return (rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)


def mean_roc_auc(probabilities_NC: Floats, label_N: Ints) -> float | None:
    """ROC-AUC of two classes, or the mean over each class against the rest; None if a class has no example."""
    num_classes = probabilities_NC.shape[1]
    indices = [1] if num_classes == 2 else range(num_classes)
    found = [roc_auc(probabilities_NC[:, index], label_N == index) for index in indices]
    return None if None in found else _mean([value for value in found if value is not None])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
