"""From probabilities to a decision, with a band around the threshold in which none is taken. Plain arithmetic."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How sure one must be. `band` is the width of the range, centred on `threshold`, that stays undecided."""

    threshold: float = 0.5
    band: float = 0.1

    def __post_init__(self) -> None:
        for name in ("threshold", "band"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:  # not a number is refused as well
                raise ValueError(f"{name} must lie in 0..1, got {value}")

    @property
    def upper(self) -> float:
        """From here on the answer counts."""
        return min(1.0, self.threshold + self.band / 2)

    @property
    def lower(self) -> float:
        """Up to here, of two choices, the other one counts."""
        return max(0.0, self.threshold - self.band / 2)


def decide(choice: Mapping[str, float], rule: Rule) -> str | None:
    """The choice that counts, or None for undecided.

    Of two choices the first is taken from `rule.upper` on and the second when the first has at most `rule.lower`; of
    more, the likeliest from `rule.upper` on. Raises ValueError for fewer than two.
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
    return best if _at_least(choice[best], rule.upper) else None


def explain(choices: tuple[str, ...], rule: Rule) -> str:
    """The rule in a sentence, for these choices."""
    if len(choices) != 2:
        return f"The likeliest choice counts when it has at least {rule.upper:.0%}; below, the picture stays undecided."
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
