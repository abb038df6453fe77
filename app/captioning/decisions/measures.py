"""Temperature scaling, and measures of calibration.

After Guo et al., "On Calibration of Modern Neural Networks" (2017): temperature scaling and the expected calibration
error. N examples, C choices.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_BINS: Final = 15
NUM_FOLDS: Final = 5
MIN_TEMPERATURE: Final = 0.05
MAX_TEMPERATURE: Final = 20.0
LEAST_PROBABILITY: Final = 1e-12  # floor, so that logarithms are finite
_Z_95: Final = 1.959963984540054  # two-sided 95 % quantile of the normal distribution


@dataclass(frozen=True, kw_only=True, slots=True)
class Bin:
    """The examples whose most likely choice has a probability above `low` and at most `high`."""

    low: float
    high: float
    count: int
    confidence: float | None  # mean probability of the most likely choice; None without examples
    accuracy: float | None  # share of right answers


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """Measures of probabilities on labelled examples."""

    accuracy: float
    nll: float  # mean negative log-likelihood, in nats
    brier: float  # mean squared distance to the label, summed over choices: 0 to 2
    ece: float  # expected calibration error over `NUM_BINS` bins of equal width


@dataclass(frozen=True, kw_only=True, slots=True)
class Threshold:
    """A threshold, and its precision and recall on the examples."""

    threshold: float
    precision: float
    precision_low: float  # lower end of Wilson's 95 % interval
    recall: float  # share of the right examples that are taken
    count: int

    @property
    def num_right(self) -> int:
        """The number of right examples that are taken."""
        return round(self.precision * self.count)


def apply_temperature(probabilities_NC: Floats, temperature: float) -> Floats:
    """Normalised p^(1/T). A temperature above 1 flattens, and one below 1 sharpens. The order of choices is kept."""
    logs_NC = np.log(np.maximum(probabilities_NC, LEAST_PROBABILITY)) / temperature
    weights_NC = np.exp(logs_NC - logs_NC.max(axis=1, keepdims=True))
    scaled_NC: Floats = weights_NC / weights_NC.sum(axis=1, keepdims=True)
    return scaled_NC


def fit_temperature(probabilities_NC: Floats, labels_N: Ints) -> float:
    """The temperature with the least negative log-likelihood, between `MIN_TEMPERATURE` and `MAX_TEMPERATURE`.

    The negative log-likelihood is convex in 1/T, and bisection finds where its slope is zero. The temperature is 1
    without examples, if all choices are equally likely, and if every answer is right. In the last case, more sharpening
    always fits better, so the examples do not determine a temperature.
    """
    if not len(labels_N) or (probabilities_NC.argmax(axis=1) == labels_N).all():
        return 1.0
    if np.ptp(np.maximum(probabilities_NC, LEAST_PROBABILITY), axis=1).max() == 0:
        return 1.0
    low, high = 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE
    if _slope(probabilities_NC, labels_N, low) >= 0:
        return MAX_TEMPERATURE
    if _slope(probabilities_NC, labels_N, high) <= 0:
        return MIN_TEMPERATURE
    while high - low > 1e-12 * low:
        middle = (low + high) / 2
        if _slope(probabilities_NC, labels_N, middle) < 0:
            low = middle
        else:
            high = middle
    return 2 / (low + high)


def _slope(probabilities_NC: Floats, labels_N: Ints, inverse: float) -> float:
    """The derivative of the mean negative log-likelihood by 1/T."""
    logs_NC = np.log(np.maximum(probabilities_NC, LEAST_PROBABILITY))
    mean_N = (apply_temperature(probabilities_NC, 1 / inverse) * logs_NC).sum(axis=1)
    right_N = logs_NC[np.arange(len(labels_N)), labels_N]
    return float((mean_N - right_N).mean())


def measure(probabilities_NC: Floats, labels_N: Ints) -> Metrics:
    """Measure probabilities on labelled examples. Raises ValueError without examples."""
    if not len(labels_N):
        raise ValueError("Wanted at least one labelled example, got none")
    rows = np.arange(len(labels_N))
    right_N = np.maximum(probabilities_NC[rows, labels_N], LEAST_PROBABILITY)
    target_NC = np.zeros_like(probabilities_NC)
    target_NC[rows, labels_N] = 1.0
    return Metrics(
        accuracy=float((probabilities_NC.argmax(axis=1) == labels_N).mean()),
        nll=0.0 - float(np.log(right_N).mean()),  # no -0.0
        brier=float(((probabilities_NC - target_NC) ** 2).sum(axis=1).mean()),
        ece=calibration_error(probabilities_NC.max(axis=1), probabilities_NC.argmax(axis=1) == labels_N),
    )


def calibration_error(confidence_N: Floats, is_right_N: NDArray[np.bool_]) -> float:
    """The expected calibration error: the mean gap between confidence and accuracy over bins, weighted by examples.

    `confidence_N` are the probabilities of the answers. Raises ValueError without examples.
    """
    if not len(confidence_N):
        raise ValueError("Wanted at least one labelled example, got none")
    bins = _binned(confidence_N, is_right_N)
    gaps = (one.count * abs((one.confidence or 0.0) - (one.accuracy or 0.0)) for one in bins)
    return sum(gaps) / len(confidence_N)


def reliability(probabilities_NC: Floats, labels_N: Ints) -> tuple[Bin, ...]:
    """Confidence and accuracy in bins of equal width."""
    is_right_N = probabilities_NC.argmax(axis=1) == labels_N
    return _binned(probabilities_NC.max(axis=1), is_right_N)


def _binned(confidence_N: Floats, is_right_N: NDArray[np.bool_]) -> tuple[Bin, ...]:
    edges = np.linspace(0.0, 1.0, NUM_BINS + 1)
    bin_N = np.clip(np.searchsorted(edges, confidence_N, side="left") - 1, 0, NUM_BINS - 1)
    bins = []
    for index in range(NUM_BINS):
        is_in = bin_N == index
        count = int(is_in.sum())
        bins.append(
            Bin(
                low=float(edges[index]),
                high=float(edges[index + 1]),
                count=count,
                confidence=float(confidence_N[is_in].mean()) if count else None,
                accuracy=float(is_right_N[is_in].mean()) if count else None,
            )
        )
    return tuple(bins)


def folds(groups_N: Ints) -> Iterator[NDArray[np.bool_]]:
    """Yield, for each fold, the mask of held-out examples. Examples of a group (one picture) are in the same fold.

    The folds are deterministic. With fewer than two groups, there are no folds.
    """
    names = np.unique(groups_N)
    if len(names) < 2:
        return
    shuffled = np.random.default_rng(0).permutation(names)
    for held in np.array_split(shuffled, min(NUM_FOLDS, len(names))):
        yield np.isin(groups_N, held)


def cross_fitted(probabilities_NC: Floats, labels_N: Ints, groups_N: Ints) -> Floats | None:
    """Probabilities of each example, scaled by a temperature fitted without this example's fold.

    None with fewer than two groups.
    """
    scaled_NC = np.full_like(probabilities_NC, np.nan)
    for held_N in folds(groups_N):
        temperature = fit_temperature(probabilities_NC[~held_N], labels_N[~held_N])
        scaled_NC[held_N] = apply_temperature(probabilities_NC[held_N], temperature)
    return None if np.isnan(scaled_NC).any() else scaled_NC


def wilson_low(num_right: int, count: int) -> float:
    """Lower end of Wilson's 95 % interval (1927) for `num_right` of `count`."""
    if count < 1:
        return 0.0
    share, z = num_right / count, _Z_95
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, (middle - spread) / (1 + z * z / count))


def find_threshold(scores_N: Floats, is_right_N: NDArray[np.bool_], *, precision: float) -> Threshold | None:
    """The threshold with the highest recall among those with at least `precision`; None if there is none.

    Among thresholds with equal recall, it is the highest one, which takes the fewest wrong examples.
    """
    enough = [one for one in thresholds(scores_N, is_right_N) if one.precision >= precision - 1e-12]
    return highest_recall(enough)


def highest_recall(found: Iterable[Threshold]) -> Threshold | None:
    """The threshold with the highest recall, and the highest one among equals; None if there is none."""
    return max(found, key=lambda one: (one.recall, one.threshold), default=None)


def best_precision(scores_N: Floats, is_right_N: NDArray[np.bool_]) -> Threshold | None:
    """The threshold with the highest precision; among equal ones, the one with most examples; None without examples."""
    return max(thresholds(scores_N, is_right_N), key=lambda one: (one.precision, one.count), default=None)


def thresholds(scores_N: Floats, is_right_N: NDArray[np.bool_]) -> Iterator[Threshold]:
    """Yield a threshold below each distinct score, halfway to the next lower score, in descending order."""
    order = np.argsort(-scores_N, kind="stable")
    right_N = np.cumsum(is_right_N[order])
    num_right = int(is_right_N.sum())
    for index, place in enumerate(order):
        score = float(scores_N[place])
        following = float(scores_N[order[index + 1]]) if index + 1 < len(order) else score
        if index + 1 < len(order) and following == score:
            continue
        taken, hits = index + 1, int(right_N[index])
        yield Threshold(
            threshold=(score + following) / 2,
            precision=hits / taken,
            precision_low=wilson_low(hits, taken),
            recall=hits / num_right if num_right else 0.0,
            count=taken,
        )
