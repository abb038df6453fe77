"""Runs `llama-adapter train` and `eval` as processes, and reads their results. Finished runs are not repeated."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from scripts.common import ROOT, tell

Figures = dict[str, Any]


def remembered(path: Path, measure: Callable[[], Figures]) -> Figures:
    """The figures in a JSON file; if there is none, they are measured and written."""
    if not path.exists():
        tell(f"measuring {path.stem}")
        figures = measure()
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(figures), encoding="utf-8")
        partial.rename(path)
    found: Figures = json.loads(path.read_text(encoding="utf-8"))
    return found


def evaluate(bundle: Path, data: Path, out: Path, *, task: Literal["choices", "open"]) -> dict[str, dict[str, float]]:
    """The figures of `eval`, by name: value, low and high of the 95 % interval, count.

    The data's test split is evaluated, or everything if they name no splits.
    """
    report = out / "scores.json"
    if not report.exists():
        tell(f"evaluating {out.name}")
        flags = ["--task", task, "--out", str(out), "--quiet", "--reader", "thread", "--model", str(bundle)]
        run_command(["eval", str(data), *flags])
    figures: dict[str, dict[str, float]] = json.loads(report.read_text(encoding="utf-8"))["figures"]
    return figures


def run_command(arguments: Sequence[str], *, threads: int | None = None) -> None:
    """Run a command, with `threads` threads if given. Raises CalledProcessError if it fails."""
    environment = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    command = [sys.executable, "-m", "llama_adapter", *arguments]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)


def write_table(path: Path, rows: Sequence[object]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
