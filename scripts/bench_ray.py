"""Compares jobs with `--engine ray` and in one process, and writes docs/ray.json and docs/ray.md.

Usage: python -m scripts.bench_ray [--pictures N] [--rounds N] [--actors N ...] [--out FOLDER] [--quick]

Every job is a separate process, and has its own cluster on this machine if it uses Ray.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llama_adapter.app.inputs import InputSpec
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.measuring.report import load_average
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.records.file import RecordWriter
from llama_adapter.app.records.record import Record, read_records
from llama_adapter.app.tasks.question import Question
from scripts.common import Tell, in_turn, machine, parse_settings, parser_of, sample_files, save_results, silent, tell

LEAD = 0.2  # share of the pictures that are answered while workers are still starting


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is measured."""

    pictures: int = 2240
    rounds: int = 3
    actors: tuple[int, ...] = (1, 2)


QUICK = Settings(pictures=28, rounds=1, actors=(1,))


def measure(settings: Settings, *, tell: Tell = silent) -> dict[str, Any]:
    """All figures as JSON values; `tell` gets a line for each job."""
    load_before, started = load_average(), time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        pictures = make_pictures(Path(place) / "pictures", number=settings.pictures)

        def run(actors: int | None) -> dict[str, Any]:
            measured = _run_apart(pictures, actors=actors)
            tell(f"{actors or 'no'} actors: {measured['pictures_per_s']:.1f} pictures/s")
            return measured

        runs = in_turn((None, *settings.actors), run, rounds=settings.rounds)  # None: one process, without Ray
    expected = runs[None][0]["records"]
    return {
        "rows": [row_of(way, found, expected) for way, found in runs.items()],
        "num_pictures": settings.pictures,
        "rounds": settings.rounds,
        "lead": LEAD,
        "elapsed_s": time.perf_counter() - started,
        "circumstances": machine("ray", load_before=load_before),
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
    samples = sample_files()
    for index in range(number):
        sample = samples[index % len(samples)]
        shutil.copy(sample, folder / f"{index}{sample.suffix}")
    return folder


def _comparable(out: Path) -> Counter[str]:
    """The records without times."""
    kept = (
        {name: value for name, value in record.items() if name not in ("ms", "run")} for record in read_records(out)
    )
    return Counter(json.dumps(record, sort_keys=True) for record in kept)


def _run_apart(pictures: Path, *, actors: int | None) -> dict[str, Any]:
    """Run a job in its own process: its rate, the seconds of the whole process, and its records."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "records.jsonl"
        command = [sys.executable, "-m", "scripts.bench_ray", "--one", str(pictures), str(out)]
        command += [] if actors is None else ["--actors", str(actors)]
        started = time.perf_counter()
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        wall_s = time.perf_counter() - started
        return {**json.loads(done.stdout.splitlines()[-1]), "wall_s": wall_s, "records": _comparable(out)}


def run_one(pictures: str, out: str, *, actors: int | None) -> dict[str, float]:
    """Run a job in this process; its rate counts the records after the first `LEAD` of them."""
    job = Job(spec=CaptionerSpec(), inputs=InputSpec(paths=(pictures,)), questions=(Question(),), out=out, quiet=True)
    times: list[float] = []
    write = RecordWriter.write

    def timed(self: RecordWriter, record: Record) -> None:
        write(self, record)
        times.append(time.perf_counter())

    RecordWriter.write = timed  # type: ignore[method-assign]
    from llama_adapter.app.jobs.run import run_job

    if actors is None:
        run_job(job)
    else:
        from llama_adapter.app.scale.cluster import RayOptions
        from llama_adapter.app.scale.runner import RayRunner

        run_job(job, RayRunner(RayOptions(actors=actors, address="local")))
    first = int(LEAD * len(times))
    return {"pictures_per_s": (len(times) - 1 - first) / max(times[-1] - times[first], 1e-9)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    flags = {"pictures": "of each job", "rounds": "jobs of each variant", "actors": "captioners at once"}
    options, settings, folder = parse_settings(parser, arguments, page="ray", full=Settings(), quick=QUICK, flags=flags)
    if options.one is not None:
        print(json.dumps(run_one(*options.one, actors=options.actors[0] if options.actors else None)))
        return
    save_results("ray", measure(settings, tell=tell), folder)


if __name__ == "__main__":
    main()
