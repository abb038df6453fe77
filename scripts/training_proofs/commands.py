"""Runs `llama-adapter train` and `eval` as processes, and reads their results. Finished runs are not repeated."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llama_adapter.app.learning.training.run_log import read_log
from scripts.common import ROOT, tell

Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A run of `train` over the embedded model."""

    name: str  # prefix of its files
    data: Path  # with splits for training, validation and testing
    flags: tuple[str, ...]


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


def train(run: Training, folder: Path) -> Figures:
    """Train into `folder`; returns the command, what is trained, processor minutes, steps, and the validation curve."""
    out = folder / f"{run.name}.pth"
    results = folder / f"{run.name}.training"

    def measure() -> Figures:
        flags = ["--resume"] if (results / "last.safetensors").exists() else ["--force"]
        seconds = run_command(["train", str(run.data), "--out", str(out), "--quiet", *run.flags, *flags])
        state = json.loads((results / "last.json").read_text(encoding="utf-8"))
        command = " ".join(["llama-adapter train", run.data.name, "--out", out.name, *run.flags])
        return {
            "command": command.replace(f"{folder}/", "").replace(f"{ROOT}/", ""),
            "processor_s": round(seconds, 1),
            "elapsed_s": round(state["elapsed_s"], 1),
            "steps": state["step"],
            "best_step": state["best_step"],
            "examples": state["num_examples"],
            "curve": read_curve(results / "log.csv"),
        }

    return remembered(folder / f"{run.name}.json", measure)


def bundle_of(run: Training, folder: Path) -> Path:
    """The bundle written by a run."""
    return folder / f"{run.name}.training" / "bundle"


def read_curve(log: Path) -> list[dict[str, float | None]]:
    """The evaluations in a log: step, validation loss and score, and the mean training loss before each of them.

    Raises ValueError for a log without evaluations.
    """
    curve, losses = list[dict[str, float | None]](), list[float]()
    for row in read_log(log):
        if row["loss"]:
            losses.append(float(row["loss"]))
        elif row["validation_loss"]:
            mean = round(sum(losses) / len(losses), 4) if losses else None
            point: dict[str, float | None] = {"step": int(row["step"]), "loss": mean}
            point |= {name: float(row[name]) for name in ("validation_loss", "validation_score") if row[name]}
            curve.append(point)
            losses.clear()
    if not curve:
        raise ValueError(f"{log} has no evaluations")
    return curve


def evaluate(
    bundle: Path | None, data: Path, out: Path, *, task: Literal["choices", "open"]
) -> dict[str, dict[str, float]]:
    """The figures of `eval`, by name: value, low and high of the 95 % interval, count.

    The data's test split is evaluated, or everything if they name no splits. If `bundle` is None, the embedded model
    is evaluated.
    """
    report = out / "scores.json"
    if not report.exists():
        tell(f"evaluating {out.name}")
        model = [] if bundle is None else ["--model", str(bundle)]
        flags = ["--task", task, "--out", str(out), "--quiet", "--reader", "thread"]
        run_command(["eval", str(data), *flags, *model])
    figures: dict[str, dict[str, float]] = json.loads(report.read_text(encoding="utf-8"))["figures"]
    return figures


def run_command(arguments: Sequence[str], *, threads: int | None = None) -> float:
    """Run a command, with `threads` threads if given. Returns the processor seconds of it and its child processes.

    Raises CalledProcessError if it fails.
    """
    environment = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "llama_adapter", *arguments]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
