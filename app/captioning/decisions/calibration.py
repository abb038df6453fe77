"""Calibrations as JSON files: `ask --calibrate` writes them, `--calibration` reads them."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

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
from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.json_object import check_fields
from llama_adapter.runtime.text import shown_excerpt

CALIBRATION_FORMAT: Final = "llama-adapter-calibration"
CALIBRATION_VERSION: Final = 1
_SCALARS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "question": (str, type(None)),
    "model_digest": str,
    "target_precision": (float, int),
    "held_out_precision": (float, int, type(None)),
    "num_examples": int,
    "num_unreadable": int,
}
_MAY_BE_MISSING: Final = {"confidence", "accuracy", "num_needed"}  # of `Bin` and `Promise`


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


_Measures = TypeVar("_Measures", Bin, Metrics, Threshold, Promise)


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
    with atomic_write(path) as file:
        file.write(text.encode() + b"\n")


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


def _calibration(parts: dict[str, Any]) -> Calibration:
    """Make a calibration from JSON values. Raises ValueError, KeyError or TypeError for invalid values."""
    choices = tuple(parts.pop("choices"))
    if len(choices) < 2 or len(set(choices)) < len(choices) or not all(isinstance(one, str) for one in choices):
        raise ValueError(f"choices {list(choices)}")
    temperature = float(parts.pop("temperature"))
    if not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:  # NaN is refused too
        raise ValueError(f"temperature {temperature}")
    held_out, promise = parts.pop("held_out"), parts.pop("promise", None)
    check_fields({name: parts.get(name) for name in _SCALARS}, _SCALARS, what="the calibration")
    return Calibration(
        choices=choices,
        temperature=temperature,
        threshold=_threshold(parts.pop("threshold")),
        best=_threshold(parts.pop("best")),
        before=_made(Metrics, parts.pop("before")),
        after=_made(Metrics, parts.pop("after")),
        held_out=None if held_out is None else _made(Metrics, held_out),
        bins_before=tuple(_made(Bin, one) for one in parts.pop("bins_before")),
        bins_after=tuple(_made(Bin, one) for one in parts.pop("bins_after")),
        promise=None if promise is None else _made(Promise, promise),
        **parts,
    )


def _made(kind: type[_Measures], parts: dict[str, Any]) -> _Measures:
    """Make measures. Raises ValueError unless they are finite numbers, or fields that may be None."""
    made = kind(**parts)
    for name, value in asdict(made).items():
        is_missing = value is None and kind in (Bin, Promise) and name in _MAY_BE_MISSING
        if not is_missing and (type(value) not in (int, float) or not math.isfinite(value)):
            raise ValueError(f"{name} {value!r}")
    return made


def _threshold(parts: dict[str, Any] | None) -> Threshold | None:
    if parts is None:
        return None
    threshold = _made(Threshold, parts)
    if not 0.0 <= threshold.threshold <= 1.0:
        raise ValueError(f"threshold {threshold.threshold}")
    return threshold
