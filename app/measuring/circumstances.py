"""Machine, versions and time of a measurement."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from llama_adapter.app.measuring.report import commit, versions


def circumstances(*, load_before: list[float] | None) -> dict[str, Any]:
    """Processor, threads, versions, commit and time as JSON values; `load_before` is the load before the run."""
    return {
        "cpu": cpu_name(),
        "num_cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": load_before,
        "versions": versions(),
        "commit": commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def load_average() -> list[float] | None:
    """Load averages over 1, 5 and 15 minutes; None if the system has none."""
    try:
        return [round(load, 2) for load in os.getloadavg()]
    except (AttributeError, OSError):
        return None


def cpu_name() -> str:
    """Name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
