"""What a calibration found, as a file of JSON: written by `ask --calibrate`, read by `--calibration`. No pictures."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from llama_adapter.app.calibration.decisions import Rule
from llama_adapter.app.calibration.measures import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Bin,
    Metrics,
    Threshold,
    apply_temperature,
)
from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.text import shown_excerpt

CALIBRATION_FORMAT: Final = "llama-adapter-calibration"
CALIBRATION_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """How to read the probabilities of these choices. All that follows `threshold` tells how good that is."""

    question: str | None  # as records show it; None when several were asked
    choices: tuple[str, ...]
    model_digest: str
    temperature: float
    target_precision: float
    # Of two choices, of the first one's calibrated probability; of more, of the likeliest one's. None: out of reach.
    threshold: Threshold | None
    held_out_precision: float | None  # of thresholds, each chosen without the examples that it was tried on
    best: Threshold | None  # the highest precision that was seen
    num_examples: int
    num_unreadable: int
    before: Metrics
    after: Metrics  # fitted and measured on the same examples
    held_out: Metrics | None  # by temperatures that were fitted without the examples they were measured on
    bins_before: tuple[Bin, ...]
    bins_after: tuple[Bin, ...]

    @property
    def rule(self) -> Rule | None:
        """How to decide on calibrated probabilities; None where no threshold reaches the target."""
        return None if self.threshold is None else Rule.from_flags(self.threshold.threshold)

    def fits(self, choice: Mapping[str, Any]) -> bool:
        """Whether a record's choices are those that were calibrated, in any order."""
        return choice.keys() == set(self.choices)

    def apply(self, choice: Mapping[str, float]) -> dict[str, float]:
        """Calibrated probabilities, in the order of `choices`. Raises ValueError for other choices."""
        if not self.fits(choice):
            raise ValueError(f"Wanted the choices {', '.join(self.choices)}, got {', '.join(choice)}")
        row = np.array([[choice[name] for name in self.choices]])
        scaled = apply_temperature(row, self.temperature)[0]
        return dict(zip(self.choices, scaled.tolist(), strict=True))


def write_calibration(calibration: Calibration, path: str) -> None:
    """Replace the file as a whole. Raises OSError."""
    content = {"format": CALIBRATION_FORMAT, "version": CALIBRATION_VERSION, **asdict(calibration)}
    text = json.dumps(content, indent=1, ensure_ascii=True, allow_nan=False)
    with atomic_write(path) as file:
        file.write(text.encode() + b"\n")


def read_calibration(path: str) -> Calibration:
    """Raises UsageError for what is none, and OSError for what cannot be read."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        content = json.loads(data)
        kind, version = content.pop("format"), content.pop("version")
        if kind != CALIBRATION_FORMAT or version != CALIBRATION_VERSION:
            raise ValueError(f"format {kind!r}, version {version!r}")
        return _calibration(content)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"Wanted a calibration ({CALIBRATION_FORMAT}, version {CALIBRATION_VERSION}) in `{os.fspath(path)}`, got "
            f"something else ({type(error).__name__}: {shown_excerpt(str(error))})",
            hint="`llama-adapter ask --calibrate` writes one",
        ) from None


def _calibration(parts: dict[str, Any]) -> Calibration:
    """Of a file's values; what cannot be meant raises ValueError, KeyError or TypeError."""
    choices = tuple(parts.pop("choices"))
    if len(choices) < 2 or len(set(choices)) < len(choices) or not all(isinstance(one, str) for one in choices):
        raise ValueError(f"choices {list(choices)}")
    temperature = float(parts.pop("temperature"))
    if not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:  # not a number is refused as well
        raise ValueError(f"temperature {temperature}")
    held_out = parts.pop("held_out")
    return Calibration(
        choices=choices,
        temperature=temperature,
        threshold=_threshold(parts.pop("threshold")),
        best=_threshold(parts.pop("best")),
        before=Metrics(**parts.pop("before")),
        after=Metrics(**parts.pop("after")),
        held_out=None if held_out is None else Metrics(**held_out),
        bins_before=tuple(Bin(**one) for one in parts.pop("bins_before")),
        bins_after=tuple(Bin(**one) for one in parts.pop("bins_after")),
        **parts,
    )


def _threshold(parts: dict[str, Any] | None) -> Threshold | None:
    if parts is None:
        return None
    threshold = Threshold(**parts)
    if not 0.0 <= threshold.threshold <= 1.0:
        raise ValueError(f"threshold {threshold.threshold}")
    return threshold
