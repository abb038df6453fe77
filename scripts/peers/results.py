"""docs/peers*.json: figures of many runs, a file per processor. A new run replaces the rows that it repeats."""

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from scripts.peers.gpus import GPUS
from scripts.peers.table import Device

PROCESSORS = ("", "zen3", "zen4", "xeon5", *GPUS)  # of pages; without a name, that of docs/peers.md
Key = tuple[str, str, str, int, int, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Rates of one engine in the rounds of one run: tokens, pictures, bytes or FLOPs per second."""

    part: str  # one of `sizes.Part`
    engine: str
    size: str
    batch: int
    threads: int
    run: str  # a key of `Results.runs`
    rates: tuple[float, ...]  # one per round
    stages_s: Mapping[str, float] = field(default_factory=dict)  # stages of a job, in the last round
    answers: str = ""  # for a job: a digest of all captions
    slots: int = 0  # for a job: rows that were computed together
    error: float = 0.0  # for an encoder: error of its output relative to ours in float32
    reads: tuple[float, ...] = ()  # for steps of one row: memory bandwidth in bytes/s between the steps, per round

    @property
    def key(self) -> Key:
        """Identifies rows that replace each other. The key of a ceiling includes its run."""
        return (self.part, self.engine, self.size, self.batch, self.threads, self.run if self.part == "ceiling" else "")

    @property
    def median(self) -> float:
        """The median rate of all rounds."""
        return statistics.median(self.rates)

    @property
    def per_byte_read(self) -> float | None:
        """The median ratio of the rate to the bandwidth at the same time; None if the bandwidth was not measured."""
        pairs = zip(self.rates, self.reads, strict=True) if self.reads else ()
        return statistics.median(shares) if (shares := [rate / read for rate, read in pairs]) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """An engine that could not be measured, and why."""

    engine: str
    size: str
    section: str
    threads: int
    problem: str  # either `missing` or `failed`
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """All known results: circumstances of each run, measured rows, and missing engines."""

    runs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    missing: tuple[Missing, ...] = ()
    processor: str = ""  # a short name, if the page has figures of another processor than `peers`

    @property
    def device(self) -> Device:
        """The device that computed."""
        return "cuda" if self.processor in GPUS else "cpu"

    @property
    def page(self) -> str:
        """The name of the page with these results, such as `peers-zen4`."""
        return f"peers-{self.processor}" if self.processor else "peers"

    def find(self, part: str, engine: str, size: str, *, batch: int, threads: int, run: str = "") -> Row | None:
        """The matching row, or None; a ceiling also needs its run."""
        key = (part, engine, size, batch, threads, run)
        return next((row for row in self.rows if row.key == key), None)

    def engines(self, part: str, size: str, *, threads: int) -> list[str]:
        """Engines that have a row in this part, in the order of the rows."""
        found = (row for row in self.rows if (row.part, row.size, row.threads) == (part, size, threads))
        return list(dict.fromkeys(row.engine for row in found))

    def merged(self, other: "Results") -> "Results":
        """These results with the rows of `other`; runs without rows are dropped."""
        replaced = {row.key for row in other.rows}
        rows = (*(row for row in self.rows if row.key not in replaced), *other.rows)
        runs = {**self.runs, **other.runs}
        used = {row.run for row in (*(row for row in rows if row.part != "ceiling"), *other.rows)}
        tried = {_place(one) for one in other.missing}
        present = {(row.engine, row.size, row.threads) for row in other.rows}
        kept = [
            one
            for one in self.missing
            if _place(one) not in tried and (one.engine, one.size, one.threads) not in present
        ]
        return Results(
            runs={name: run for name, run in runs.items() if name in used},
            rows=tuple(row for row in rows if row.run in used),
            missing=(*kept, *other.missing),
            processor=self.processor,
        )


def from_json(values: Mapping[str, Any]) -> Results:
    """Parse the content of the file."""
    return Results(
        runs=values["runs"],
        rows=tuple(
            Row(**{**row, "rates": tuple(row["rates"]), "reads": tuple(row.get("reads", ()))}) for row in values["rows"]
        ),
        missing=tuple(Missing(**one) for one in values["missing"]),
        processor=values.get("processor", ""),
    )


def to_json(results: Results) -> dict[str, Any]:
    """The content of the file; `from_json` reads it."""
    return {
        "runs": results.runs,
        "rows": [_stated(row) for row in results.rows],
        "missing": [_stated(one) for one in results.missing],
        **({"processor": results.processor} if results.processor else {}),
    }


def _stated(one: Row | Missing) -> dict[str, Any]:
    """The fields that are not empty."""
    return {name: value for name, value in asdict(one).items() if value not in ({}, "", 0, ())}


def _place(one: Missing) -> tuple[str, str, str, int]:
    return (one.engine, one.size, one.section, one.threads)
