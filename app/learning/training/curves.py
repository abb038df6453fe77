"""Draws `curves.png` of a run from its log: loss, validation loss, score and learning rate by step."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

_SMOOTH: Final = 0.9  # weight of the earlier steps in the smoothed loss


def draw_curves(rows: Sequence[Mapping[str, str]], path: Path, *, title: str) -> bool:
    """Draw the rows of a log; returns whether matplotlib is installed. Raises OSError."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns if its own cache is in a temporary folder
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    has_score = any(row.get("validation_score") for row in rows)
    figure = Figure(figsize=(8, 6 if has_score else 4.5), layout="constrained")
    heights = [3, 2, 1] if has_score else [3, 1]
    axes: Any = figure.subplots(len(heights), 1, sharex=True, gridspec_kw={"height_ratios": heights})
    step, loss = _column(rows, "loss")
    axes[0].plot(step, loss, color="0.8", linewidth=0.8)
    axes[0].plot(step, _smoothed(loss), color="tab:blue", label="training")
    held_step, held_loss = _column(rows, "validation_loss")
    if len(held_step):
        axes[0].plot(held_step, held_loss, "o-", color="tab:orange", markersize=4, label="validation")
    axes[0].set_ylabel("loss per token")
    if len(loss) and loss.min() > 0 and loss.max() > 20 * loss.min():
        axes[0].set_yscale("log")
    axes[0].legend(frameon=False)
    axes[0].set_title(title)
    if has_score:
        score_step, score = _column(rows, "validation_score")
        axes[1].plot(score_step, score, "o-", color="tab:green", markersize=4)
        axes[1].set_ylabel("score")
    rate_step, rate = _column(rows, "lr")
    axes[-1].plot(rate_step, rate, color="tab:red")
    axes[-1].set_ylabel("learning rate")
    axes[-1].set_xlabel("step")
    for one in axes:
        one.grid(alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    return True


def _column(rows: Sequence[Mapping[str, str]], name: str) -> tuple[np.ndarray, np.ndarray]:
    found = [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]
    array = np.array(found, dtype=np.float64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _smoothed(values: np.ndarray) -> np.ndarray:
    smooth, mean = [], 0.0
    for place, value in enumerate(values):
        mean = _SMOOTH * mean + (1 - _SMOOTH) * value if np.isfinite(value) else mean
        smooth.append(mean / (1 - _SMOOTH ** (place + 1)))
    return np.array(smooth)
