"""Stage times and answers -> a report with its circumstances, as a table and as JSON. Measures nothing itself."""

import math
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import llama_adapter
from llama_adapter.app.measuring.latencies import Latencies


class AnswerLike(Protocol):
    """What a report needs to know of an answer."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def error(self) -> object | None: ...
    @property
    def ms(self) -> Mapping[str, float]: ...


class ModelLike(Protocol):
    """What a report says of the model."""

    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def vision(self) -> str: ...
    @property
    def mode(self) -> str: ...
    @property
    def operators(self) -> str: ...


@dataclass(kw_only=True, slots=True)
class Tally:
    """Counts answers as they come, so that none has to be kept."""

    num_pictures: int = 0  # answered
    num_failed: int = 0
    num_tokens: int = 0
    latencies: Latencies = field(default_factory=Latencies)  # from reading the picture to its whole answer

    def add(self, answer: AnswerLike) -> None:
        """Take one answer into the counts."""
        if answer.error is not None:
            self.num_failed += 1
            return
        self.num_pictures += 1
        self.num_tokens += len(answer.token_ids)
        self.latencies.add(answer.ms["total"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Where the time of a run went, and under which circumstances."""

    stages_s: dict[str, float]
    wall_s: float
    num_pictures: int
    num_failed: int
    num_tokens: int
    latency_p50_ms: float | None  # None without an answer
    latency_p95_ms: float | None
    model: str
    model_digest: str
    device: str
    dtype: str
    precision: str  # float or int8, of the linear layers' weights
    vision: str  # what runs the encoder
    mode: str  # how the decoder's steps are run
    operators: str  # what they compute by
    batch_size: int
    num_warm_up_pictures: int
    synchronised: bool  # profile mode: the device was waited for at each boundary
    device_stages_s: dict[str, float] | None  # the device's own time by stage, where it tells
    versions: dict[str, str]
    commit: str | None

    @property
    def pictures_per_s(self) -> float:
        """Answered pictures by wall time."""
        return self.num_pictures / self.wall_s if self.wall_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the answers by wall time."""
        return self.num_tokens / self.wall_s if self.wall_s else 0.0

    @property
    def tokens_per_picture(self) -> float:
        """Mean length of an answer."""
        return self.num_tokens / self.num_pictures if self.num_pictures else 0.0

    @property
    def bound_by(self) -> tuple[str, float] | None:
        """The longest stage and its share of all stages; None when no time was measured."""
        total = sum(self.stages_s.values())
        if not total:
            return None
        stage = max(self.stages_s, key=lambda name: self.stages_s[name])
        return stage, self.stages_s[stage] / total

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, the derived figures among them."""
        bound_by = self.bound_by
        return {
            **asdict(self),
            "pictures_per_s": self.pictures_per_s,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_picture": self.tokens_per_picture,
            "bound_by": None if bound_by is None else {"stage": bound_by[0], "share": bound_by[1]},
        }

    def format_table(self) -> str:
        """The report for a person."""
        total = sum(self.stages_s.values())
        rows = [*self.stages_s.items(), ("total", total)]
        on_device = dict(self.device_stages_s or {})
        on_device["total"] = sum(on_device.values())
        lines = [f"{'stage':<8} {'seconds':>9} {'share':>7} {'ms/picture':>11}"]
        lines[0] += f" {'on device':>10}" if self.device_stages_s else ""
        for name, seconds in rows:
            share = f"{seconds / total:.1%}" if total else "-"
            per_picture = f"{seconds * 1e3 / self.num_pictures:.2f}" if self.num_pictures else "-"
            device = f" {on_device[name]:>10.3f}" if self.device_stages_s else ""
            lines.append(f"{name:<8} {seconds:>9.3f} {share:>7} {per_picture:>11}{device}")
        failed = f" ({self.num_failed} more failed)" if self.num_failed else ""
        lines += [
            "",
            f"{self.num_pictures} pictures{failed} in {self.wall_s:.3f} s: {self.pictures_per_s:.2f} pictures/s, "
            f"{self.tokens_per_s:.1f} tokens/s, {self.tokens_per_picture:.1f} tokens a picture",
        ]
        if self.latency_p50_ms is not None:
            lines.append(f"latency of a picture: p50 {self.latency_p50_ms:.1f} ms, p95 {self.latency_p95_ms:.1f} ms")
        if self.bound_by is not None:
            longest, part = self.bound_by
            lines.append(f"bound by: {longest} ({part:.0%} of the time)")
        clock = "device waited for at each stage" if self.synchronised else "the host's times, device not waited for"
        lines += [
            f"{self.device}, {numbers(self.dtype, self.precision)}, {self.mode} ({self.operators}), "
            f"encoder by {self.vision}, batch size {self.batch_size}, "
            f"warm-up {self.num_warm_up_pictures} pictures, {clock}",
            f"model {self.model} {self.model_digest[:12]}, "
            + ", ".join(f"{name} {version}" for name, version in self.versions.items())
            + (f", commit {self.commit}" if self.commit else ""),
        ]
        return "\n".join(lines)


def make_report(
    tally: Tally,
    *,
    stages_s: Mapping[str, float],
    wall_s: float,
    model: ModelLike,
    batch_size: int,
    synchronised: bool,
    num_warm_up_pictures: int = 0,
    device_stages_s: Mapping[str, float] | None = None,
) -> Report:
    """The report of a run; `stages_s` is `StageClock.seconds`, `device_stages_s` its `device_seconds`."""
    return Report(
        stages_s=dict(stages_s),
        wall_s=wall_s,
        num_pictures=tally.num_pictures,
        num_failed=tally.num_failed,
        num_tokens=tally.num_tokens,
        latency_p50_ms=tally.latencies.percentile(0.50),
        latency_p95_ms=tally.latencies.percentile(0.95),
        model=model.name,
        model_digest=model.digest,
        device=model.device,
        dtype=model.dtype,
        precision=model.precision,
        vision=model.vision,
        mode=model.mode,
        operators=model.operators,
        batch_size=batch_size,
        num_warm_up_pictures=num_warm_up_pictures,
        synchronised=synchronised,
        device_stages_s=None if device_stages_s is None else dict(device_stages_s),
        versions=versions(),
        commit=commit(),
    )


def numbers(dtype: str, precision: str) -> str:
    """Such as: float32; or, with 8-bit weights: int8 and float32."""
    return dtype if precision == "float" else f"{precision} and {dtype}"


def versions() -> dict[str, str]:
    """Versions that a figure or an answer may depend on, without importing what they are of."""
    found = {"python": platform.python_version()}
    for package in ("torch", "pillow", "llama-adapter"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Short hash of the checkout this runs from, None outside of one or without git."""
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
    """Nearest rank: a value that occurred, at or below which this fraction of all values lies."""
    if not ascending:
        return None
    return ascending[max(math.ceil(fraction * len(ascending)) - 1, 0)]
