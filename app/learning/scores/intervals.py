"""Intervals: of metrics by bootstrap draws of pictures; of shares by exact binomial tails, or after Wilson.

Percentile intervals follow Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), chapter 13. Questions about
one picture are not independent, so whole pictures are drawn (the cluster bootstrap of Field and Welsh, 2007). The
exact bounds for shares of independent examples are those of Clopper and Pearson (1934); those of Wilson (1927)
are narrower, since they cover 95 % on average and not at least. N examples.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from llama_adapter.app.captioning.decisions.measures import wilson_low
from llama_adapter.app.learning.scores.outcome import Floats, Ints

NUM_DRAWS: Final = 1000
LEVEL: Final = 0.95
_NUM_HALVINGS: Final = 40  # of an interval of width 1, to 1e-12

Key = TypeVar("Key", bound=Hashable)
# Indices of examples, which may repeat -> name -> the metric of these examples. None: undefined.
Statistics = Callable[[Ints], Mapping[Key, float | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """The bootstrap draws for intervals. With `count` 0 there are no intervals."""

    count: int = NUM_DRAWS
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """The value of a metric, and its 95 % interval.

    The interval is the bootstrap's. Shares of a class, those of `train`'s yardstick, and shares of right answers that
    are 0 or 1 have Wilson's.
    """

    value: float | None  # None if it is undefined, such as the recall of a class without examples
    low: float | None = None  # None if there is no interval: no draws, fewer than two pictures, or all draws alike
    high: float | None = None
    count: int  # number of examples that it is computed from


def figures(statistics: Statistics[Key], groups_N: Ints, draws: Draws) -> dict[Key, Figure]:
    """The metrics of all examples, with intervals.

    `groups_N` is the number of each example's picture. Draws in which a metric is undefined do not count for its
    interval.
    """
    everything = np.arange(len(groups_N), dtype=np.int64)
    values = statistics(everything)
    drawn: dict[Key, list[float]] = {key: [] for key in values}
    names, place_N = np.unique(groups_N, return_inverse=True)
    random = np.random.default_rng(draws.seed)
    for _ in range(draws.count if len(names) > 1 else 0):
        times = np.bincount(random.integers(len(names), size=len(names)), minlength=len(names))
        for key, value in statistics(np.repeat(everything, times[place_N])).items():
            if value is not None:
                drawn[key].append(value)
    return {key: _figure(value, drawn[key], len(everything)) for key, value in values.items()}


def means(values: Mapping[str, Floats]) -> Statistics[str]:
    """A function that gives the mean of each of `values`, (N,), over the chosen examples."""
    return lambda chosen: {name: float(values_N[chosen].mean()) for name, values_N in values.items()}


def _figure(value: float | None, drawn: list[float], count: int) -> Figure:
    if value is None or not drawn:
        return Figure(value=value, count=count)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Figure(value=value, low=float(low), high=float(high), count=count)


def at_most(count: int, total: int, share: float) -> float:
    """The probability of at most `count` successes in `total` independent trials, each a success with `share`."""
    if count >= total or share <= 0.0:
        return 1.0
    if share >= 1.0:
        return 0.0
    successes = np.arange(1, count + 1)
    steps = np.log((total - successes + 1) / successes) + np.log(share / (1.0 - share))
    log_terms = total * np.log1p(-share) + np.concatenate(([0.0], np.cumsum(steps)))
    return min(1.0, float(np.exp(log_terms).sum()))


def exact_low(num_right: int, count: int, *, level: float) -> float:
    """The lower bound of Clopper and Pearson for a share, which is too high with a probability of at most `level`."""
    low, high = 0.0, 1.0  # of the share of wrong ones; its upper bound is looked for
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if at_most(count - num_right, count, middle) > level else (low, middle)
    return 1.0 - high


def exact_interval(num_right: int, count: int, *, level: float = 0.05) -> tuple[float, float]:
    """The two-sided interval of Clopper and Pearson, 95 % by default, for `num_right` of `count`."""
    return exact_low(num_right, count, level=level / 2), 1.0 - exact_low(count - num_right, count, level=level / 2)


def wilson_interval(num_right: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval (1927) for `num_right` of `count` independent examples; 0 to 1 without examples."""
    return wilson_low(num_right, count), 1.0 - wilson_low(count - num_right, count)
