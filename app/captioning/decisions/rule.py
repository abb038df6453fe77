"""Thresholds: turn probabilities into a decision, or into none within a band around the threshold."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A threshold, and a range without decisions: `abstain`, or a range of width `band` around the threshold.

    All numbers are in 0..1.
    """

    threshold: float = 0.5
    band: float = 0.1
    abstain: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        low, high = (0.0, 1.0) if self.abstain is None else self.abstain
        if not 0.0 <= low <= high <= 1.0:  # NaN is refused too
            raise ValueError(f"abstain must be two numbers in 0..1, the smaller one first, got {low},{high}")
        for name in ("threshold", "band"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} must lie in 0..1, got {value}")
        if not low <= self.threshold <= high:
            raise ValueError(f"threshold must lie in the range of abstain, {low}..{high}, got {self.threshold}")

    @classmethod
    def from_flags(cls, threshold: float | None, abstain: tuple[float, float] | None = None) -> Self | None:
        """The rule of --threshold and --abstain, or None if neither is given. Raises ValueError.

        With a threshold alone, no range is undecided. With a range alone, the threshold is the upper end of the range.
        """
        if abstain is not None:
            return cls(threshold=abstain[1] if threshold is None else threshold, abstain=abstain)
        return None if threshold is None else cls(threshold=threshold, band=0.0)

    @property
    def upper(self) -> float:
        """With two choices, the first is taken from this probability on."""
        return min(1.0, self.threshold + self.band / 2) if self.abstain is None else self.abstain[1]

    @property
    def lower(self) -> float:
        """With two choices, the second is taken if the first has at most this probability."""
        return max(0.0, self.threshold - self.band / 2) if self.abstain is None else self.abstain[0]

    @property
    def least(self) -> float:
        """With more choices, the most likely one is taken from this probability on."""
        return self.upper if self.abstain is None else self.threshold


def decide(choice: Mapping[str, float], rule: Rule) -> str | None:
    """The choice that is taken; None if undecided.

    With two choices, the first is taken if its probability is at least `rule.upper`, and the second if the first has at
    most `rule.lower`. With more choices, the most likely one is taken if its probability is at least `rule.least`.
    Raises ValueError for fewer than two choices.
    """
    if len(choice) < 2:
        raise ValueError(f"Wanted at least two choices, got {list(choice)}")
    names = list(choice)
    if len(names) == 2:
        first, second = names
        if _at_least(choice[first], rule.upper):
            return first
        return second if _at_least(rule.lower, choice[first]) else None
    best = max(names, key=lambda name: choice[name])
    return best if _at_least(choice[best], rule.least) else None


def explain(choices: tuple[str, ...], rule: Rule) -> str:
    """The rule in a sentence, for these choices."""
    if len(choices) != 2:
        return f"The likeliest choice counts when it has at least {rule.least:.0%}; below, the picture stays undecided."
    first, second = choices
    between = "" if rule.upper <= rule.lower else f", and undecided between {rule.lower:.0%} and {rule.upper:.0%}"
    return f"“{first}” from {rule.upper:.0%} on, “{second}” up to {rule.lower:.0%}{between}."


def _at_least(value: float, bound: float) -> bool:
    """Whether `value >= bound`, with a tolerance, because 0.5 + 0.1 / 2 is not exactly 0.55."""
    return value > bound or math.isclose(value, bound, abs_tol=1e-9)
