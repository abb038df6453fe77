"""Calibrations as JSON files: `ask --calibrate` writes them, `--calibration` reads them."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from types import UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

import numpy as np

from llama_adapter.app.captioning.decisions.measures import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Bin,
    Metrics,
    Threshold,
    apply_temperature,
)
from llama_adapter.app.captioning.decisions.rule import Rule
from llama_adapter.runtime.atomic_write import write_text
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.text import shown_excerpt

CALIBRATION_FORMAT: Final = "llama-adapter-calibration"
CALIBRATION_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """What holds for new pictures like the labelled ones, apart from a share `1 - confidence` of calibrations."""

    bound: float  # the precision of the threshold is at least this
    confidence: float  # of `bound`, which is valid although the threshold was chosen by the same examples
    taken_low: float  # 95 % interval of the share of pictures that reach the threshold
    taken_high: float
    num_needed: (
        int | None
    )  # labelled examples that would promise the target; None: it is promised, or cannot be guessed
    num_pictures: int  # of the examples


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """A fitted temperature and threshold for these choices. The fields after `threshold` are measurements of them."""

    question: str | None  # as in records; None: several questions
    choices: tuple[str, ...]
    model_digest: str
    temperature: float
    target_precision: float
    # Applies to the calibrated probability of the first of two choices, or of the most likely of more choices. None: no
    # threshold reaches the target precision.
    threshold: Threshold | None
    held_out_precision: float | None  # cross-validated: measured on examples that did not choose the threshold
    best: Threshold | None  # the threshold of the highest precision
    num_examples: int
    num_unreadable: int
    before: Metrics
    after: Metrics  # fitted and measured on the same examples
    held_out: Metrics | None  # cross-validated
    bins_before: tuple[Bin, ...]
    bins_after: tuple[Bin, ...]
    promise: Promise | None = None  # None without a threshold, and in files of earlier versions

    @property
    def is_promised(self) -> bool:
        """Whether the threshold has the target precision on new pictures too, with the confidence of the promise."""
        return self.promise is not None and self.promise.bound >= self.target_precision

    @property
    def rule(self) -> Rule | None:
        """The rule for calibrated probabilities; None if no threshold reaches the target."""
        return None if self.threshold is None else Rule.from_flags(self.threshold.threshold)

    def fits(self, choice: Mapping[str, Any]) -> bool:
        """Whether a record has the calibrated choices, in any order."""
        return choice.keys() == set(self.choices)

    def apply(self, choice: Mapping[str, float]) -> dict[str, float]:
        """Calibrated probabilities, in the order of `choices`. Raises ValueError for other choices."""
        if not self.fits(choice):
            raise ValueError(f"Wanted the choices {', '.join(self.choices)}, got {', '.join(choice)}")
        row = np.array([[choice[name] for name in self.choices]])
        scaled = apply_temperature(row, self.temperature)[0]
        return dict(zip(self.choices, scaled.tolist(), strict=True))


def write_calibration(calibration: Calibration, path: str) -> None:
    """Write the file atomically. Raises OSError."""
    content = {"format": CALIBRATION_FORMAT, "version": CALIBRATION_VERSION, **asdict(calibration)}
    text = json.dumps(content, indent=1, ensure_ascii=True, allow_nan=False)
    write_text(path, f"{text}\n")


def read_calibration(path: str) -> Calibration:
    """Read a calibration. Raises UsageError for a file that is not a calibration, and OSError."""
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


def _calibration(values: dict[str, Any]) -> Calibration:
    """Make a calibration from JSON values. Raises ValueError, KeyError or TypeError for invalid values."""
    made: Calibration = _made(Calibration, values)
    if len(made.choices) < 2 or len(set(made.choices)) < len(made.choices):
        raise ValueError(f"choices {list(made.choices)}")
    if not MIN_TEMPERATURE <= made.temperature <= MAX_TEMPERATURE:
        raise ValueError(f"temperature {made.temperature}")
    for one in (made.threshold, made.best):
        if one is not None and not 0.0 <= one.threshold <= 1.0:
            raise ValueError(f"threshold {one.threshold}")
    return made


def _made(kind: Any, value: Any) -> Any:
    """A value of this type from a JSON value: a dataclass, a tuple, a text, a whole or finite number, or None.

    Raises ValueError, KeyError or TypeError for any other value.
    """
    if get_origin(kind) is UnionType:
        return None if value is None else _made(get_args(kind)[0], value)
    if is_dataclass(kind) and type(value) is dict:
        kinds = get_type_hints(kind)
        return kind(**{name: _made(kinds[name], one) for name, one in value.items()})  # type: ignore[operator]
    if get_origin(kind) is tuple and type(value) is list:
        return tuple(_made(get_args(kind)[0], one) for one in value)
    if kind in (str, int) and type(value) is kind:
        return value
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return value
    raise ValueError(f"{value!r}")
