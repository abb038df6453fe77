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
# Figures by name of some examples, given by their indices, of which some may come several times. None: undefined.
Statistics = Callable[[Ints], Mapping[Key, float | None]]


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


def figures(statistics: Statistics[Key], groups_N: Ints, draws: Draws) -> dict[Key, Figure]:
    """The figures of all examples, with intervals.

    `groups_N` are the numbers of the examples' pictures. Draws in which a figure is undefined are left out of its
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
    """The mean of each kind of value, (N,), over the examples."""
    return lambda chosen: {name: mean(values_N[chosen]) for name, values_N in values.items()}


def mean(values: Floats) -> float | None:
    """None without values."""
    return float(values.mean()) if len(values) else None


def _figure(value: float | None, drawn: list[float], count: int) -> Figure:
    if value is None or not drawn:
        return Figure(value=value, count=count)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Figure(value=value, low=float(low), high=float(high), count=count)
