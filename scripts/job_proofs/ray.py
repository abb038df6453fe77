"""Jobs with `--engine ray`, beside jobs in one process: rates, and records that differ."""

import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llama_adapter.app.jobs.records.record import read_records
from scripts.common import in_turn, sample_files, tell, watched_job

LEAD = 0.2  # share of the pictures that are answered while workers are still starting
ACTORS = (None, 1, 2)  # numbers of captioners; None is one process, without Ray


def compare_jobs(work: Path, *, number: int, rounds: int) -> dict[str, Any]:
    """Caption `number` pictures in all variants, in turn. Each job with Ray starts its own cluster on this machine.

    The pictures are in a folder of `work` for this number, so that those of another run are not among them.
    """
    pictures = work / f"samples-{number}"
    make_pictures(pictures, number=number)

    def run(actors: int | None) -> dict[str, Any]:
        measured = _run_job(pictures, actors=actors)
        tell(f"{actors or 'no'} actors: {measured['pictures_per_s']:.1f} pictures/s")
        return measured

    runs = in_turn(ACTORS, run, rounds=rounds)
    expected = runs[None][0]["records"]
    rows = [row_of(way, found, expected) for way, found in runs.items()]
    return {"rows": rows, "num_pictures": number, "rounds": rounds, "lead": LEAD}


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


def make_pictures(folder: Path, *, number: int) -> None:
    """Fill a folder with `number` copies of the samples."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, sample in enumerate(sample_files(number)):
        shutil.copy(sample, folder / f"{index}{sample.suffix}")


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
