"""From probabilities to a decision, with a band around the threshold in which none is taken. Plain arithmetic."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How sure one must be, and the range in which nothing is decided.

    That range is `abstain`, from its lower to its upper end, or else `band` wide and centred on `threshold`.
    """

    threshold: float = 0.5
    band: float = 0.1
    abstain: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        low, high = (0.0, 1.0) if self.abstain is None else self.abstain
        if not 0.0 <= low <= high <= 1.0:  # not a number is refused as well
            raise ValueError(f"abstain must be two numbers in 0..1, the smaller one first, got {low},{high}")
        for name in ("threshold", "band"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} must lie in 0..1, got {value}")
        if not low <= self.threshold <= high:
            raise ValueError(f"threshold must lie in the range of abstain, {low}..{high}, got {self.threshold}")

    @classmethod
    def from_flags(cls, threshold: float | None, abstain: tuple[float, float] | None = None) -> Self | None:
        """The rule of a command line: a threshold alone leaves nothing undecided of two choices; neither, no rule.

        A range alone asks of more than two choices that the likeliest reaches its upper end. Raises ValueError.
        """
        if abstain is not None:
            return cls(threshold=abstain[1] if threshold is None else threshold, abstain=abstain)
        return None if threshold is None else cls(threshold=threshold, band=0.0)

    @property
    def upper(self) -> float:
        """From here on, of two choices, the first one counts."""
        return min(1.0, self.threshold + self.band / 2) if self.abstain is None else self.abstain[1]

    @property
    def lower(self) -> float:
        """Up to here, of two choices, the other one counts."""
        return max(0.0, self.threshold - self.band / 2) if self.abstain is None else self.abstain[0]

    @property
    def least(self) -> float:
        """From here on, of more than two choices, the likeliest one counts."""
        return self.upper if self.abstain is None else self.threshold


def decide(choice: Mapping[str, float], rule: Rule) -> str | None:
    """The choice that counts, or None for undecided.

    Of two choices the first is taken from `rule.upper` on and the second when the first has at most `rule.lower` (with
    both ends equal, the first); of more, the likeliest from `rule.least` on. Raises ValueError for fewer than two.
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
    """With a hair's room: 0.5 + 0.1 / 2 is not exactly 0.55."""
    return value > bound or math.isclose(value, bound, abs_tol=1e-9)


def parse_choices(text: str) -> tuple[str, ...]:
    """Choices as typed, apart by commas or lines. Raises ValueError unless they are two to twelve different ones."""
    choices = tuple(part.strip() for part in text.replace("\n", ",").split(",") if part.strip())
    if not 2 <= len(choices) <= 12 or len(set(choices)) < len(choices):
        raise ValueError(
            f"Wanted two to twelve different choices, apart by commas, got {len(choices)} in: {text[:80]!r}"
        )
    return choices
