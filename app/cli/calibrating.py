"""`--calibrate`: flags -> a calibration job."""

import argparse
from typing import Any

from llama_adapter.app.cli.parser import default
from llama_adapter.app.cli.values import settings, spec_from
from llama_adapter.runtime.errors import UsageError


def add_calibrating(group: Any) -> None:
    """Add --calibrate and the flags that go with it."""
    group.add_argument(
        "--calibrate",
        metavar="FILE",
        help="a .csv, .tsv or .jsonl table with columns picture (relative to the table's folder), label (one of "
        "--choices) and optionally prompt: fit a temperature and a threshold to the labels; PICTURES restrict it",
    )
    group.add_argument("--calibration-out", metavar="FILE.json", help="where to write the calibration")
    group.add_argument(
        "--target-precision", metavar="P", type=float, default=0.95, help=default("of answers above the threshold")
    )
    group.add_argument("--plot", metavar="FILE.png", help="draw a reliability diagram (extra `bench`)")
    group.add_argument("--force", action="store_true", help="replace existing files")


def run_calibrate(options: argparse.Namespace) -> int:
    """Calibrate. Raises UsageError for flags that do not apply."""
    for name in ("questions", "lists", "manifests", "shard", "out", "threshold", "abstain", "calibration"):
        if getattr(options, name):
            flag = "--" + name.rstrip("s" if name in ("lists", "manifests") else "").replace("_", "-")
            raise UsageError(f"--calibrate takes its pictures from its table, and {flag} has no meaning beside it")
    for name in ("calibration_out", "choices"):
        if getattr(options, name) is None:
            raise UsageError(f"--calibrate goes with --{name.replace('_', '-')}, which is missing")
    spec = spec_from(options)
    from llama_adapter.app.jobs.calibrate import CalibrationJob, run_calibration

    values = {"spec": spec, "question": options.instruction, "pictures": tuple(options.paths)}
    return run_calibration(settings(CalibrationJob, {**vars(options), **values}))
