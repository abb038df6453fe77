"""Figures with bootstrap intervals, drawn by picture.

Percentile intervals after Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), chapter 13. Questions about
one picture depend on each other, so whole pictures are drawn (the cluster bootstrap of Field and Welsh, 2007). N
examples.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from llama_adapter.app.scores.outcome import Floats, Ints

NUM_DRAWS: Final = 1000
LEVEL: Final = 0.95

Key = TypeVar("Key", bound=Hashable)
# A figure of some examples, given by their indices, of which some may come several times; None where it is undefined.
Statistic = Callable[[Ints], float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """How intervals are drawn. With no draws, figures have no intervals."""

    count: int = NUM_DRAWS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"The number of draws must be at least 0, got {self.count}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A value, and its 95 % bootstrap interval."""

    value: float | None  # None where it is undefined: the recall of a class without examples
    low: float | None = None  # None without an interval: fewer than two pictures, or no draws
    high: float | None = None
    count: int  # examples that it is computed from


def figures(statistics: Mapping[Key, Statistic], groups_N: Ints, draws: Draws) -> dict[Key, Figure]:
    """Each statistic of all examples, with an interval. All statistics see the same draws.

    `groups_N` are the numbers of the examples' pictures, from 0 without gaps. Draws in which a statistic is undefined
    are left out of its interval.
    """
    count = len(groups_N)
    everything = np.arange(count, dtype=np.int64)
    values = {key: statistic(everything) for key, statistic in statistics.items()}
    num_groups = int(groups_N.max()) + 1 if count else 0
    drawn: dict[Key, list[float]] = {key: [] for key in statistics}
    random = np.random.default_rng(draws.seed)
    for _ in range(draws.count if num_groups > 1 else 0):
        times = np.bincount(random.integers(num_groups, size=num_groups), minlength=num_groups)
        chosen = np.repeat(everything, times[groups_N])
        for key, statistic in statistics.items():
            value = statistic(chosen)
            if value is not None:
                drawn[key].append(value)
    return {key: _figure(values[key], drawn[key], count) for key in statistics}


def _figure(value: float | None, drawn: list[float], count: int) -> Figure:
    if value is None or not drawn:
        return Figure(value=value, count=count)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Figure(value=value, low=float(low), high=float(high), count=count)


def mean_of(values_N: Floats) -> Statistic:
    """The mean of a value of each example."""
    return lambda chosen: float(values_N[chosen].mean()) if len(chosen) else None
