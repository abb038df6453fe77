"""The log of a run, step by step: `log.csv`, its curves, and TensorBoard's files if its package is installed."""

import csv
import io
import logging
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from llama_adapter.app.learning.training.checkpoint import TrainingError
from llama_adapter.runtime.atomic_write import write_text
from llama_adapter.runtime.text import shown_name

COLUMNS: Final = (
    *("step", "epoch", "loss", "lr", "gradient_norm", "examples_per_s", "tokens", "seconds"),
    *("validation_loss", "validation_score"),
)
LOG = "log.csv"
_STEP: Final = re.compile("[0-9]{1,15}")


class RunLog:
    """Appends rows to `log.csv` in a folder. A resumed run first removes the rows after its checkpoint."""

    def __init__(self, folder: Path, *, from_step: int) -> None:
        """Raises TrainingError for a file that is no log, and OSError."""
        path, beginning = folder / LOG, io.StringIO(newline="")
        writer = csv.DictWriter(beginning, COLUMNS)
        writer.writeheader()
        if from_step:
            writer.writerows(row for row in read_log(path) if int(row["step"]) <= from_step)
        write_text(path, beginning.getvalue())
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, COLUMNS)
        self._board = _tensorboard(folder / "tensorboard", from_step=from_step)

    def add(self, step: int, values: Mapping[str, float | int | None]) -> None:
        """Append a row; values that are None or missing are empty."""
        shown = {
            name: f"{value:.6g}" if isinstance(value, float) else value
            for name, value in values.items()
            if value is not None
        }
        self._writer.writerow({"step": step, **shown})
        self._file.flush()
        for name, value in values.items():
            if self._board is not None and value is not None and math.isfinite(value):
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Complete the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_log(path: Path) -> list[dict[str, str]]:
    """The rows of a log; none if there is no file. An incomplete last line, as a crash may leave it, is left out.

    Raises TrainingError for a file that is no log of a training, and OSError.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    if not (whole := content[: content.rfind(b"\n") + 1]):
        return []
    try:
        header, *rows = csv.reader(io.StringIO(whole.decode(), newline=""), strict=True)
        if tuple(header) != COLUMNS:
            raise ValueError
        return [_row(cells) for cells in rows]
    except (ValueError, csv.Error):  # UnicodeDecodeError is a ValueError
        raise TrainingError(
            f"`{shown_name(str(path))}` is no log of a training",
            hint="restore it from a copy, or move it away: then the log begins with the next step",
        ) from None


def _row(cells: Sequence[str]) -> dict[str, str]:
    """A row with its columns. Raises ValueError unless it has a step, and numbers or nothing in the other columns."""
    row = dict(zip(COLUMNS, cells, strict=True))
    if not _STEP.fullmatch(row["step"]):
        raise ValueError
    for cell in filter(None, cells):
        float(cell)
    return row


def _tensorboard(folder: Path, *, from_step: int) -> Any:
    """torch's writer of TensorBoard's files, None without the package `tensorboard`."""
    with suppress(ImportError):
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(folder), purge_step=from_step + 1 if from_step else None)
    return None


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
    heights = {"loss per token": 3, **({"score": 2} if has_score else {}), "learning rate": 1}
    axes: Any = figure.subplots(len(heights), 1, sharex=True, height_ratios=list(heights.values()))
    for one, label in zip(axes, heights, strict=True):
        one.set_ylabel(label)
        one.grid(alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
    step, loss = _column(rows, "loss")
    axes[0].plot(step, loss, color="0.8", linewidth=0.8)
    axes[0].plot(step, _smoothed(loss), color="tab:blue", label="training")
    held_step, held_loss = _column(rows, "validation_loss")
    if len(held_step):
        axes[0].plot(held_step, held_loss, "o-", color="tab:orange", markersize=4, label="validation")
    finite = loss[np.isfinite(loss)]
    if len(finite) and finite.min() > 0 and finite.max() > 20 * finite.min():
        axes[0].set_yscale("log")
    axes[0].legend(frameon=False)
    axes[0].set_title(title)
    if has_score:
        axes[1].plot(*_column(rows, "validation_score"), "o-", color="tab:green", markersize=4)
    axes[-1].plot(*_column(rows, "lr"), color="tab:red")
    axes[-1].set_xlabel("step")
    figure.savefig(path, dpi=120)
    return True


def _column(rows: Sequence[Mapping[str, str]], name: str) -> tuple[np.ndarray, np.ndarray]:
    found = [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]
    array = np.array(found, dtype=np.float64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _smoothed(values: np.ndarray) -> np.ndarray:
    smooth, mean, weight = [], 0.0, 0.0  # values that are not finite have no weight
    for value in values:
        if np.isfinite(value):
            mean, weight = _SMOOTH * mean + (1 - _SMOOTH) * value, _SMOOTH * weight + (1 - _SMOOTH)
        smooth.append(mean / weight if weight else np.nan)
    return np.array(smooth)
