"""Messages to and from a child process, as JSON."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from scripts.peers.table import Section


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One engine, one size: to be opened, and measured at some batch sizes."""

    section: Section
    engine: str
    size: str  # of a decoder or an encoder; of a job, both as `sizes.job_size` joins them
    work: str  # folder of the files that peers run
    threads: int
    batch_sizes: tuple[int, ...] = ()
    prefill_batch_sizes: tuple[int, ...] = ()
    left_out: tuple[tuple[str, int], ...] = ()  # (part, batch): too long to repeat
    num_steps: int = 32
    budget_s: float = 2.5
    flash: str = "auto"
    only_files: bool = False  # make the files that the engine needs, and measure nothing

    def to_json(self) -> str:
        """As `from_json` takes it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Task":
        """Inverse of `to_json`."""
        values = json.loads(text)
        for name in ("batch_sizes", "prefill_batch_sizes"):
            values[name] = tuple(values[name])
        values["left_out"] = tuple((part, batch) for part, batch in values["left_out"])
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """Figures of `measuring.Figure.to_dict`, each with a `name`, or a problem."""

    figures: list[dict[str, Any]] = field(default_factory=list)
    load_s: float = 0.0
    problem: Literal["", "missing", "failed"] = ""
    reason: str = ""
    packages: dict[str, str] = field(default_factory=dict)  # versions of the peer
    circumstances: dict[str, Any] = field(default_factory=dict)  # of the section `machine`

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Reply":
        """Inverse of `to_json`."""
        return cls(**json.loads(text))
