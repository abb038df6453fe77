"""Reports how the time of a run was spent, and its circumstances: machine, versions and time."""

import math
import os
import platform
import subprocess
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import llama_adapter
from llama_adapter.app.captioning.stage_clock import HOST_STAGES
from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.models.spec import ModelInfo
from llama_adapter.runtime.text import counted

MOST_NAMED: Final = 3  # unfamiliar pictures in a note


@dataclass(kw_only=True, slots=True)
class Tally:
    """Counts of answers, updated one by one; 8 bytes for each answer."""

    what: str = "picture"  # what an answer is about, in one word
    num_pictures: int = 0  # answers
    num_failed: int = 0
    num_tokens: int = 0
    num_judged: int = 0  # answers of a model that detects pictures unlike its training data
    num_unfamiliar: int = 0  # of these, answers about such pictures
    unfamiliar_names: list[str] = field(default_factory=list)  # the first ones, at most one more than `MOST_NAMED`
    times_ms: "array[float]" = field(default_factory=lambda: array("d"))  # from reading a picture to its whole answer

    def add(self, answer: Answer) -> None:
        """Count one answer."""
        if answer.error is not None:
            self.num_failed += 1
            return
        self.num_pictures += 1
        self.num_tokens += len(answer.token_ids)
        self.times_ms.append(answer.ms["total"])
        if answer.unfamiliar is None:
            return
        self.num_judged += 1
        self.num_unfamiliar += answer.unfamiliar
        names = self.unfamiliar_names
        if answer.unfamiliar and answer.picture not in names and len(names) <= MOST_NAMED:
            names.append(answer.picture)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """How the time of a run was spent, and the circumstances of the run."""

    stages_s: Mapping[str, float]  # `StageClock.seconds`
    wall_s: float
    tally: Tally
    model: ModelInfo
    batch_size: int
    synchronised: bool  # whether the clock waited for the device at each stage
    num_warm_up_pictures: int = 0
    device_stages_s: Mapping[str, float] | None = None  # seconds on the device by stage, if the clock set marks

    def format_table(self) -> str:
        """The report as text."""
        total, what = sum(self.stages_s.values()), self.tally.what
        rows = [*self.stages_s.items(), ("total", total)]
        on_device = dict(self.device_stages_s or {})
        on_device["total"] = sum(on_device.values())
        lines = [f"{'stage':<8} {'seconds':>9} {'share':>7} {f'ms/{what}':>11}"]
        lines[0] += f" {'on device':>10}" if self.device_stages_s else ""
        for name, seconds in rows:
            share = f"{seconds / total:.1%}" if total else "-"
            per_picture = f"{seconds * 1e3 / self.tally.num_pictures:.2f}" if self.tally.num_pictures else "-"
            device = f" {on_device[name]:>10.3f}" if self.device_stages_s else ""
            lines.append(f"{name:<8} {seconds:>9.3f} {share:>7} {per_picture:>11}{device}")
        failed = f" ({self.tally.num_failed} more failed)" if self.tally.num_failed else ""
        num_pictures, num_tokens, wall_s = self.tally.num_pictures, self.tally.num_tokens, self.wall_s or math.inf
        lines += [
            "",
            f"{counted(num_pictures, what)}{failed} in {self.wall_s:.3f} s: {num_pictures / wall_s:.2f} {what}s/s, "
            f"{num_tokens / wall_s:.1f} tokens/s, {num_tokens / max(num_pictures, 1):.1f} tokens per {what}",
        ]
        if self.tally.num_pictures:
            p50, p95 = (percentile(sorted(self.tally.times_ms), fraction) for fraction in (0.50, 0.95))
            lines.append(f"latency per {what}: p50 {p50:.1f} ms, p95 {p95:.1f} ms")
        # The host's times do not show what a device with a queue does.
        if (longest := longest_stage(self.device_stages_s or self.stages_s)) is not None:
            stage, part = longest
            lines.append(f"bound by: {stage} ({part:.0%} of the time)")
        if self.device_stages_s:
            idle_s = sum(self.device_stages_s.get(stage, 0.0) for stage in HOST_STAGES)
            part = idle_s / (on_device["total"] or math.inf)
            lines.append(f"device without work: {idle_s:.3f} s ({part:.0%} of its time), in {', '.join(HOST_STAGES)}")
        clock = "device waited for at each stage" if self.synchronised else "the host's times, device not waited for"
        model, made_by = self.model, commit()
        lines += [
            f"{model.device}, {numbers(model.dtype, model.precision)}, {model.mode} ({model.operators}), "
            f"encoder by {model.vision}, batch size {self.batch_size}, "
            f"warm-up {counted(self.num_warm_up_pictures, 'picture')}, {clock}",
            f"model {model.name} {model.digest[:12]}, "
            + ", ".join(f"{name} {version}" for name, version in versions().items())
            + (f", commit {made_by}" if made_by else ""),
        ]
        return "\n".join(lines)


def longest_stage(stages_s: Mapping[str, float]) -> tuple[str, float] | None:
    """The longest stage and its share of all stages; None if no time was measured."""
    total = sum(stages_s.values())
    stage = max(stages_s, key=lambda name: stages_s[name], default="")
    return (stage, stages_s[stage] / total) if total > 0 else None


def numbers(dtype: str, precision: str) -> str:
    """The number types in words: `float32`, or with 8-bit weights `int8 and float32`."""
    return dtype if precision == "float" else f"{precision} and {dtype}"


def circumstances(*, load_before: list[float] | None) -> dict[str, Any]:
    """Processor, threads, versions, commit and time as JSON values; `load_before` is the load before the run."""
    import torch

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
    """Name of the processor. On x86 with family and model, because virtual machines may give a general name only."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")
    except OSError:
        first = ""
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    name = facts.get("model name", platform.processor() or platform.machine())
    if "cpu family" in facts and "model" in facts:
        return f"{name} (family {facts['cpu family']}, model {facts['model']})"
    return name


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that figures and answers may depend on."""
    from importlib import metadata  # takes as long to import as all of this file

    found = {"python": platform.python_version()}
    for package in ("torch", "pillow", "llama-adapter"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Short commit hash of this checkout; None if this is not a checkout or git is missing."""
    home = Path(llama_adapter.__file__).resolve().parents[1]
    if not (home / ".git").exists():
        return None
    try:
        answer = subprocess.run(
            ["git", "-C", str(home), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def percentile(ascending: Sequence[float], fraction: float) -> float | None:
    """The nearest-rank percentile: the smallest value such that this fraction of all values is at or below it."""
    if not ascending:
        return None
    return ascending[max(math.ceil(fraction * len(ascending)) - 1, 0)]
