"""Figures of runs through a service."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from llama_adapter.app.captioning.stage_clock import STAGES
from llama_adapter.app.jobs.report import longest_stage
from llama_adapter.app.models.spec import ModelInfo

_BESIDE_THE_ENGINE: Final = ("read",)  # stages that run in other threads than the engine


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFigures:
    """One run: pictures of one client, with a fixed number of requests in flight.

    The stage times are those of the service during the run. With `was_shared`, they include pictures of other clients.
    All stages except `read` run one after another in the engine thread.
    """

    started_at: str  # ISO 8601, UTC
    in_flight: int  # maximum number of requests at once
    num_pictures: int  # answered pictures
    num_failed: int
    num_tokens: int
    num_reused: int  # answered from the cache of encoded pictures
    wall_s: float
    stages_s: dict[str, float]
    was_shared: bool
    info: ModelInfo
    threads: int
    batch_size: int  # number of slots of the engine

    @property
    def rows(self) -> int:
        """The maximum number of pictures answered at once."""
        return min(self.in_flight, self.batch_size)

    @property
    def pictures_per_s(self) -> float:
        """Answered pictures by wall time."""
        return self.num_pictures / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the answers by wall time."""
        return self.num_tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def stage_ms(self) -> dict[str, float]:
        """Milliseconds per answered picture by stage, in the order in which a picture passes the stages."""
        if not self.num_pictures:
            return {}
        return {stage: self.stages_s.get(stage, 0.0) * 1e3 / self.num_pictures for stage in STAGES}

    @property
    def bound_by(self) -> tuple[str, float] | None:
        """The longest stage and its share of all stages; None if no time was measured."""
        return longest_stage(self.stages_s)

    @property
    def busy_share(self) -> float:
        """Share of the run in which the engine thread worked, and did not wait for pictures."""
        busy_s = sum(seconds for stage, seconds in self.stages_s.items() if stage not in _BESIDE_THE_ENGINE)
        return min(1.0, busy_s / self.wall_s) if self.wall_s > 0 else 0.0


def stage_differences(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Seconds by stage between two readings. They are at least 0, because a restart resets the counters."""
    return {stage: max(0.0, seconds - before.get(stage, 0.0)) for stage, seconds in after.items()}
