"""Decides on a record's probabilities: by a calibration, by a rule, or by taking the most likely choice."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from llama_adapter.app.captioning.decisions.calibration import Calibration
from llama_adapter.app.captioning.decisions.rule import Rule, decide

UNDECIDED: Final = "undecided"

_DIGITS: Final = 6  # significant digits of the numbers in tables

Choice = Mapping[str, float | None]  # as in records; None replaces a number that is not finite


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The decision on one record."""

    text: str  # one of the choices, or `UNDECIDED`
    probability: float | None  # of this choice; if undecided, of the most likely choice
    choice: dict[str, float | None]  # the probabilities that the decision is based on


@dataclass(frozen=True, kw_only=True, slots=True)
class Decider:
    """Makes decisions. `rule` takes precedence over the rule of the calibration."""

    rule: Rule | None = None
    calibration: Calibration | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the decision is always the most likely choice."""
        return self.rule is None and self.calibration is None

    def doubts(self, *, prompts: Iterable[str], model_digests: Iterable[str]) -> list[str]:
        """Notes for the user if the calibration was made for other prompts or another model, or has no threshold."""
        if self.calibration is None:
            return []
        question, found = self.calibration.question, []
        others = [prompt for prompt in prompts if prompt != question]
        if question is not None and others:
            found.append(f"note: the calibration is of {question!r}, and there are answers to {others[0]!r}")
        if any(digest != self.calibration.model_digest for digest in model_digests):
            found.append("note: the calibration is of another model than some of these answers")
        if self.calibration.threshold is None and self.rule is None:
            target = f"{self.calibration.target_precision:.1%}"
            why = f"no threshold of this calibration reaches a precision of {target}"
            found.append(f"note: {why}: the likeliest choice counts")
        return found

    def decide(self, choice: Choice) -> Decision:
        """The decision on a record's choices. It is undecided if a probability is missing or not finite.

        Raises ValueError for choices other than the calibrated ones, and for fewer than two.
        """
        numbers = {name: value for name, value in choice.items() if value is not None and math.isfinite(value)}
        if len(numbers) < len(choice):
            return Decision(text=UNDECIDED, probability=None, choice=dict(choice))
        rule = self.rule
        if self.calibration is not None:
            numbers = self.calibration.apply(numbers)
            rule = self.calibration.rule if rule is None else rule
        best = max(numbers, key=lambda name: numbers[name])
        text = best if rule is None else decide(numbers, rule)
        return Decision(
            text=UNDECIDED if text is None else text,
            probability=_rounded(numbers[best if text is None else text]),
            choice={name: _rounded(value) for name, value in numbers.items()},
        )


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
