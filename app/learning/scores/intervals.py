"""Metrics with bootstrap intervals, drawn by picture.

Percentile intervals follow Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), chapter 13. Questions about
one picture are not independent, so whole pictures are drawn (the cluster bootstrap of Field and Welsh, 2007). N
examples.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from llama_adapter.app.learning.scores.outcome import Floats, Ints

NUM_DRAWS: Final = 1000
LEVEL: Final = 0.95

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
    """The value of a metric, and its 95 % bootstrap interval."""

    value: float | None  # None if it is undefined, such as the recall of a class without examples
    low: float | None = None  # None if there is no interval: fewer than two pictures, or no draws
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
    return lambda chosen: {name: mean(values_N[chosen]) for name, values_N in values.items()}


def mean(values: Floats) -> float | None:
    """The mean; None without values."""
    return float(values.mean()) if len(values) else None


def _figure(value: float | None, drawn: list[float], count: int) -> Figure:
    if value is None or not drawn:
        return Figure(value=value, count=count)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Figure(value=value, low=float(low), high=float(high), count=count)
