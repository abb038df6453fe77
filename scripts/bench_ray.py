"""Compares jobs with `--engine ray` with jobs in one process, and writes docs/ray.json and docs/ray.md.

Usage: python -m scripts.bench_ray [--pictures N] [--rounds N] [--actors N ...] [--out FOLDER] [--quick]

Every job is a separate process. A job that uses Ray starts its own cluster on this machine.
"""

import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from llama_adapter.app.jobs.records.record import read_records
from scripts.bench import run_bench
from scripts.common import in_turn, sample_files, tell, watched_job

LEAD = 0.2  # share of the pictures that are answered while workers are still starting


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is measured."""

    pictures: Annotated[int, "pictures of each job"] = 2240
    rounds: Annotated[int, "jobs of each variant"] = 3
    actors: Annotated[tuple[int, ...], "numbers of captioners"] = (1, 2)


QUICK = Settings(pictures=28, rounds=1, actors=(1,))


def measure(settings: Settings) -> dict[str, Any]:
    """Jobs of all variants, in turn."""
    with tempfile.TemporaryDirectory() as place:
        pictures = make_pictures(Path(place) / "pictures", number=settings.pictures)

        def run(actors: int | None) -> dict[str, Any]:
            measured = _run_job(pictures, actors=actors)
            tell(f"{actors or 'no'} actors: {measured['pictures_per_s']:.1f} pictures/s")
            return measured

        runs = in_turn((None, *settings.actors), run, rounds=settings.rounds)  # None: one process, without Ray
    expected = runs[None][0]["records"]
    return {
        "rows": [row_of(way, found, expected) for way, found in runs.items()],
        "num_pictures": settings.pictures,
        "rounds": settings.rounds,
        "lead": LEAD,
    }


def row_of(way: int | None, runs: Sequence[Mapping[str, Any]], expected: Counter[str]) -> dict[str, Any]:
    """The figures of one variant: medians of its runs, and the number of records that differ from `expected`."""
    rates = [run["pictures_per_s"] for run in runs]
    return {
        "actors": way,
        "pictures_per_s": float(np.median(rates)),
        "rounds": rates,
        "wall_s": float(np.median([run["wall_s"] for run in runs])),
        "different": sum((run["records"] - expected).total() for run in runs),
        "missing": sum((expected - run["records"]).total() for run in runs),
    }


def make_pictures(folder: Path, *, number: int) -> Path:
    """A folder of `number` pictures, copies of the samples."""
    folder.mkdir()
    for index, sample in enumerate(sample_files(number)):
        shutil.copy(sample, folder / f"{index}{sample.suffix}")
    return folder


def _comparable(out: Path) -> Counter[str]:
    """The records without times."""
    kept = (
        {name: value for name, value in record.items() if name not in ("ms", "run")} for record in read_records(out)
    )
    return Counter(json.dumps(record, sort_keys=True) for record in kept)


def _run_job(pictures: Path, *, actors: int | None) -> dict[str, Any]:
    """Run a job in its own process: its rate, the seconds of the whole process, and its records.

    The rate leaves out the first `LEAD` share of the records.
    """
    flags = [] if actors is None else ["--engine", "ray", "--actors", str(actors), "--ray-address", "local"]
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "records.jsonl"
        started = time.perf_counter()
        grown = [(number, time.perf_counter()) for _, number in watched_job(pictures, out, flags)]
        wall_s = time.perf_counter() - started
        total = grown[-1][0]
        first, start = next(one for one in grown if one[0] > LEAD * total)
        end = next(when for number, when in grown if number == total)
        rate = (total - first) / max(end - start, 1e-9)
        return {"pictures_per_s": rate, "wall_s": wall_s, "records": _comparable(out)}


def main(arguments: Sequence[str] | None = None) -> None:
    run_bench(__doc__, arguments, measure=measure, page="ray", packages=("ray",), full=Settings(), quick=QUICK)


if __name__ == "__main__":
    main()
