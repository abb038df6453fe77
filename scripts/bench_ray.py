"""Measures jobs with `--engine ray` beside one process, and writes docs/ray.json and docs/ray.md.

Usage: python -m scripts.bench_ray [--pictures N] [--rounds N] [--actors N ...] [--out FOLDER] [--quick]

Every job is a process of its own, with a cluster of its own where it has one: this machine. Ways take turns. `--quick`
only shows that it runs, and writes nothing without `--out`.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llama_adapter.app.inputs import InputSpec
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.measuring.circumstances import circumstances, load_average
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.records.file import RecordWriter
from llama_adapter.app.records.record import Record, read_records
from llama_adapter.app.tasks.question import Question
from scripts.ray_bench.page import as_markdown

DOCS = Path(__file__).resolve().parents[1] / "docs"
LEAD = 0.2  # of the pictures: until so many are answered, workers are still starting

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is measured."""

    num_pictures: int = 2240
    rounds: int = 3
    actors: tuple[int, ...] = (1, 2)


QUICK = Settings(num_pictures=28, rounds=1, actors=(1,))


def measure(settings: Settings, *, tell: Tell = lambda line: None) -> dict[str, Any]:
    """Everything, as JSON values; `tell` gets a line for each job that was run."""
    load_before, started = load_average(), time.perf_counter()
    ways: list[int | None] = [None, *settings.actors]  # None: one process, without Ray
    runs: dict[int | None, list[dict[str, Any]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as place:
        pictures = make_pictures(Path(place) / "pictures", number=settings.num_pictures)
        for number in range(settings.rounds):
            for way in ways:
                out = Path(place) / f"{number}-{way}.jsonl"
                run = _run_apart(pictures, out, actors=way)
                run["records"] = _comparable(out)
                runs[way].append(run)
                tell(f"{way or 'no'} actors: {run['pictures_per_s']:.1f} pictures a second")
    expected = runs[None][0]["records"]
    about = circumstances(load_before=load_before)
    about["versions"] |= {"ray": importlib.metadata.version("ray")}
    return {
        "rows": [row_of(way, runs[way], expected) for way in ways],
        "num_pictures": settings.num_pictures,
        "rounds": settings.rounds,
        "lead": LEAD,
        "elapsed_s": time.perf_counter() - started,
        "circumstances": about | {"omp_num_threads": os.environ.get("OMP_NUM_THREADS", "unset")},
    }


def row_of(way: int | None, runs: Sequence[Mapping[str, Any]], expected: Counter[str]) -> dict[str, Any]:
    """The figures of one way: medians of its runs, and the records that are not those of one process."""
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
    """So many pictures: copies of the samples."""
    folder.mkdir()
    samples = sorted(path for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))
    for index in range(number):
        sample = samples[index % len(samples)]
        shutil.copy(sample, folder / f"{index}{sample.suffix}")
    return folder


def _comparable(out: Path) -> Counter[str]:
    """Records without times; probabilities, of which there are none here, would differ in their last digits."""
    kept = [
        {name: value for name, value in record.items() if name not in ("ms", "run")} for record in read_records(out)
    ]
    return Counter(json.dumps(record, sort_keys=True) for record in kept)


def _run_apart(pictures: Path, out: Path, *, actors: int | None) -> dict[str, Any]:
    """Run a job in a process of its own: seconds of all of it, and its rate once it is under way."""
    command = [sys.executable, "-m", "scripts.bench_ray", "--one", str(pictures), str(out)]
    command += [] if actors is None else ["--actors", str(actors)]
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    wall_s = time.perf_counter() - started
    return {**json.loads(done.stdout.splitlines()[-1]), "wall_s": wall_s}


def run_one(pictures: str, out: str, *, actors: int | None) -> dict[str, float]:
    """Run a job here; its rate is that of the records after the first `LEAD` of them."""
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
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and fast: does it run?")
    parser.add_argument("--pictures", type=int, help=f"of each job (default: {Settings().num_pictures})")
    parser.add_argument("--rounds", type=int, help=f"jobs of each way (default: {Settings().rounds})")
    parser.add_argument("--actors", type=int, nargs="+", help="captioners at once (default: 1 2)")
    parser.add_argument("--out", type=Path, help="folder of ray.json and ray.md (default: docs)")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one is not None:
        print(json.dumps(run_one(*options.one, actors=options.actors[0] if options.actors else None)))
        return
    given = {
        "num_pictures": options.pictures,
        "rounds": options.rounds,
        "actors": None if options.actors is None else tuple(options.actors),
    }
    if any(min(value if isinstance(value, tuple) else (value,)) <= 0 for value in given.values() if value is not None):
        parser.error("--pictures, --rounds and --actors are above 0")
    settings = dataclasses.replace(
        QUICK if options.quick else Settings(), **{name: value for name, value in given.items() if value is not None}
    )
    content = measure(settings, tell=lambda line: print(line, file=sys.stderr, flush=True))
    folder = options.out or (None if options.quick else DOCS)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ray.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (folder / "ray.md").write_text(as_markdown(content), encoding="utf-8")


if __name__ == "__main__":
    main()
