"""What the benchmark and its child processes send each other, pickled."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from scripts.peers.sizes import Part
from scripts.peers.table import Engine

Rung = tuple[Part, int]  # a figure to measure: a part, at a batch size


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One engine and one size: what to open, and the batch sizes to measure."""

    engine: Engine
    size: str  # of a decoder or an encoder; of both for a job, such as `1B+ViT-L/14`
    work: str  # folder of the files that other programs run
    threads: int
    rungs: tuple[Rung, ...]
    num_rows: int = 16  # rows that an engine must hold
    num_steps: int = 32
    budget_s: float = 2.5
    timeout_s: float = 600.0  # then the child process is ended
    enough_s: float = math.inf  # after this time, no further figure is begun
    on: str = ""  # a device that stands in for the engine's
    instructions: str = "best"  # instruction sets to use, one of `results.INSTRUCTIONS`
    only_files: bool = False  # only make the files that the engine needs

    @property
    def device(self) -> str:
        """The device that computes."""
        return self.on or self.engine.device


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One result of one round: a rate per second, and the seconds spent on measuring it."""

    part: Part
    batch: int
    rate: float
    spent_s: float
    engine: str = ""  # or the name of a ceiling
    stages_s: Mapping[str, float] = field(default_factory=dict)  # for a job
    answers: str = ""  # for a job: a digest of all captions
    slots: int = 0  # for a job: rows that were computed together
    error: float = 0.0  # for an encoder: relative error of its output for a sample picture
    read: float = 0.0  # for steps of one row: memory bandwidth in bytes/s between the steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """Figures, or a problem."""

    figures: list[Figure] = field(default_factory=list)
    load_s: float = 0.0
    problem: Literal["", "missing", "failed"] = ""
    reason: str = ""
    packages: dict[str, str] = field(default_factory=dict)  # versions of the engine's packages
    circumstances: dict[str, Any] = field(default_factory=dict)  # for the section `machine`
