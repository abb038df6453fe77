"""The log of a run, step by step: `log.csv`, and TensorBoard's files if its package is installed."""

import csv
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

COLUMNS: Final = (
    *("step", "epoch", "loss", "lr", "gradient_norm", "examples_per_s", "tokens", "seconds"),
    *("validation_loss", "validation_score"),
)
LOG = "log.csv"


class RunLog:
    """Appends rows to `log.csv` in a folder. A resumed run first removes the rows after its checkpoint."""

    def __init__(self, folder: Path, *, from_step: int) -> None:
        """Raises OSError."""
        path = folder / LOG
        kept = [row for row in read_log(path) if int(row["step"]) <= from_step] if from_step else []
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, COLUMNS)
        self._writer.writeheader()
        self._writer.writerows(kept)
        self._file.flush()
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
    """The complete rows of a log; none if there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if row.get("step", "").isdecimal() and None not in row.values()]


def _tensorboard(folder: Path, *, from_step: int) -> Any:
    """torch's writer of TensorBoard's files, None without the package `tensorboard`."""
    with suppress(ImportError):
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(folder), purge_step=from_step + 1 if from_step else None)
    return None
