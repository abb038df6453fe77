"""Fits a calibration to labelled examples. Its threshold holds on new pictures, not on these examples alone.

A threshold that is chosen among many looks better on its examples than it is. Two bounds allow for the choice. Together
they are wrong in at most `LEVEL` of all calibrations:

- Fixed-sequence testing, as in Angelopoulos et al., "Learn then Test" (2021, arXiv:2110.01052). From the most certain
  examples down, each threshold is tested with the exact binomial test against the target precision, until the first
  failure. All thresholds before it have the target precision. No correction for their number is needed, because the
  order does not depend on the labels. It is assumed that more certain answers are right at least as often.
- If no threshold passes: the exact bound (Clopper and Pearson 1934) of the threshold with the target precision on the
  examples, at a level that is divided by the number of thresholds (Bonferroni).

Examples are taken as independent. N examples, C choices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llama_adapter.app.captioning.decisions import measures
from llama_adapter.app.captioning.decisions.calibration import Calibration, Promise
from llama_adapter.app.captioning.decisions.measures import Floats, Ints, Threshold
from llama_adapter.app.learning.scores.intervals import at_most, exact_interval, exact_low


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """Answered labelled pictures: N of them, with C choices."""

    probabilities_NC: Floats
    labels_N: Ints  # indices of the right choices
    groups_N: Ints  # equal for questions about the same picture


def calibrate(
    examples: Examples,
    *,
    choices: tuple[str, ...],
    question: str | None,
    model_digest: str,
    target_precision: float,
    num_unreadable: int = 0,
) -> Calibration:
    """Fit a temperature, choose the threshold, and measure both. Raises ValueError without examples.

    The threshold promises the target precision for new pictures if the examples suffice for that (see `choose`).
    Otherwise it is the one of highest recall with that precision on the examples.
    """
    raw_NC, labels_N = examples.probabilities_NC, examples.labels_N
    temperature = measures.fit_temperature(raw_NC, labels_N)
    scaled_NC = measures.apply_temperature(raw_NC, temperature)
    held_out_NC = measures.cross_fitted(raw_NC, labels_N, examples.groups_N)
    scores_N, is_right_N = _decisive(scaled_NC, labels_N)
    is_likely_N = scaled_NC.argmax(axis=1) == 0 if len(choices) == 2 else np.ones(len(labels_N), dtype=bool)
    threshold, promise = choose(
        scores_N,
        is_right_N,
        target_precision=target_precision,
        num_likely=int(is_likely_N.sum()),
        num_pictures=len(np.unique(examples.groups_N)),
    )
    return Calibration(
        question=question,
        choices=choices,
        model_digest=model_digest,
        temperature=temperature,
        target_precision=target_precision,
        threshold=threshold,
        held_out_precision=_held_out_precision(examples, target_precision),
        best=measures.best_precision(scores_N, is_right_N),
        num_examples=len(labels_N),
        num_unreadable=num_unreadable,
        before=measures.measure(raw_NC, labels_N),
        after=measures.measure(scaled_NC, labels_N),
        held_out=None if held_out_NC is None else measures.measure(held_out_NC, labels_N),
        bins_before=measures.reliability(raw_NC, labels_N),
        bins_after=measures.reliability(scaled_NC, labels_N),
        promise=promise,
    )


def _decisive(probabilities_NC: Floats, labels_N: Ints) -> tuple[Floats, NDArray[np.bool_]]:
    """The probability that thresholds apply to (first of two, else most likely), and whether that choice is right."""
    if probabilities_NC.shape[1] == 2:
        return probabilities_NC[:, 0], labels_N == 0
    return probabilities_NC.max(axis=1), probabilities_NC.argmax(axis=1) == labels_N


def _held_out_precision(examples: Examples, target_precision: float) -> float | None:
    """The cross-validated precision of thresholds with this precision on the examples that they were found on."""
    num_taken = num_right = 0
    for held_N in measures.folds(examples.groups_N):
        temperature = measures.fit_temperature(examples.probabilities_NC[~held_N], examples.labels_N[~held_N])
        scores_N, is_right_N = _decisive(
            measures.apply_temperature(examples.probabilities_NC, temperature), examples.labels_N
        )
        threshold = measures.find_threshold(scores_N[~held_N], is_right_N[~held_N], precision=target_precision)
        if threshold is not None:
            is_taken = scores_N[held_N] >= threshold.threshold
            num_taken += int(is_taken.sum())
            num_right += int(is_right_N[held_N][is_taken].sum())
    return num_right / num_taken if num_taken else None


LEVEL: Final = 0.05  # how often a promise may be broken
_SEQUENCE_LEVEL: Final = 0.04  # the part of `LEVEL` that the tests in sequence use; the other bound uses the rest
_FIRST_SHARE: Final = 4  # the first test has at least one in so many of the examples, so that it allows for errors
_MOST_NEEDED: Final = 100_000  # a larger number is no help
_Z_LEVEL: Final = 1.751  # quantile of the normal distribution for `_SEQUENCE_LEVEL`
_Z_POWER: Final = 1.0  # and for 84 % of the cases


def choose(
    scores_N: Floats, is_right_N: NDArray[np.bool_], *, target_precision: float, num_likely: int, num_pictures: int
) -> tuple[Threshold | None, Promise | None]:
    """The threshold for a target precision, and what it promises; None if none has it on the examples.

    `num_likely` is the number of examples whose answer is the one that the threshold decides about. `num_pictures` is
    the number of pictures of the examples.
    """
    found = list(measures.thresholds(scores_N, is_right_N))
    start = max(num_likely // _FIRST_SHARE, 1)
    tested = [one for one in found if one.count >= start and _passes(0, one.count, target_precision)]
    chosen, bound, num_needed = measures.highest_recall(_passed(tested, target_precision)), target_precision, None
    if chosen is None:
        chosen = measures.find_threshold(scores_N, is_right_N, precision=target_precision)
        if chosen is None:
            return None, None
        # Whether something is tested in sequence depends on no label, so without tests the whole level is left.
        level = (LEVEL - _SEQUENCE_LEVEL if tested else LEVEL) / len(found)
        bound = exact_low(chosen.num_right, chosen.count, level=level)
        if chosen.num_right == chosen.count and chosen.count * _FIRST_SHARE >= num_likely:
            num_needed = _num_needed_without_error(chosen.count, len(scores_N), target_precision)
        else:
            num_needed = _num_needed(found, target_precision)
    low, high = exact_interval(chosen.count, len(scores_N))
    return chosen, Promise(
        bound=bound,
        confidence=1 - LEVEL,
        taken_low=low,
        taken_high=high,
        num_needed=num_needed,
        num_pictures=num_pictures,
    )


def _passes(num_wrong: int, count: int, precision: float) -> bool:
    """Whether so few wrong ones of `count` are unlikely if the share of right ones is below `precision`."""
    return at_most(num_wrong, count, 1 - precision) <= _SEQUENCE_LEVEL


def _passed(tested: Sequence[Threshold], precision: float) -> list[Threshold]:
    """The thresholds before the first one that does not pass."""
    passed = []
    for one in tested:
        if not _passes(one.count - one.num_right, one.count, precision):
            break
        passed.append(one)
    return passed


def _num_needed_without_error(count: int, total: int, precision: float) -> int | None:
    """How many examples suffice if no answer of a threshold is wrong, as none of its `count` answers of `total` is.

    The examples say nothing about an error rate above 0, so none is assumed: an estimate such as Jeffreys' would be
    close to the allowed rate for a few right answers, and so ask for any number of them. None if the number is no help.
    """
    if precision >= 1.0:
        return None
    needed = -(-math.ceil(math.log(_SEQUENCE_LEVEL) / math.log(precision)) * total // count)
    return needed if needed <= _MOST_NEEDED else None


def _num_needed(found: Sequence[Threshold], precision: float) -> int | None:
    """About how many examples suffice for a test to pass in most cases, if the share of a threshold's examples stays.

    This is the sample size of a one-sided test with the normal approximation. The share of wrong ones is Jeffreys'
    estimate, (wrong + 1/2) / (count + 1). None if no threshold is precise enough for any number.
    """
    total, allowed, needed = max(one.count for one in found), 1 - precision, []
    for one in found:
        wrong = (one.count - one.num_right + 0.5) / (one.count + 1)
        if wrong < allowed:
            spread = _Z_LEVEL * math.sqrt(allowed * precision) + _Z_POWER * math.sqrt(wrong * (1 - wrong))
            needed.append((spread / (allowed - wrong)) ** 2 * total / one.count)
    return min((math.ceil(number) for number in needed if number <= _MOST_NEEDED), default=None)
