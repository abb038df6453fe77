"""Measures how fast pictures are read, in threads and in processes, and writes docs/reading.json and docs/reading.md.

Usage: python -m scripts.bench_reading [--seconds N] [--rounds N] [--out FOLDER] [--quick]

Reading is opening, hashing, decoding and resizing, without any model. `--quick` only shows that it runs, and writes
nothing without `--out`.
"""

import argparse
import dataclasses
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llama_adapter.app.measuring.circumstances import circumstances, load_average
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.reading.isolated import IsolatedReader
from llama_adapter.app.reading.prefetch import Prefetcher
from llama_adapter.app.reading.reader import PictureReader, Reader
from scripts.reading_bench.page import as_markdown
from scripts.reading_bench.pictures import KINDS, make_pictures

DOCS = Path(__file__).resolve().parents[1] / "docs"
SIZE = 224
TIMEOUT_S = 60.0
MIN_PICTURES = 8  # of each sample, so that the last ones, for which not all are at work, count for little

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is measured."""

    seconds: float = 12.0  # of each way and kind, all rounds together
    rounds: int = 6
    kinds: tuple[str, ...] = KINDS
    at_once: tuple[int, ...] = (1, 2)


QUICK = Settings(seconds=0.1, rounds=1, kinds=KINDS[:2])


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way to read, with what holds its processes."""

    reader: str  # thread or process
    at_once: int
    read: Reader

    @property
    def process_ids(self) -> tuple[int, ...]:
        return self.read.process_ids if isinstance(self.read, IsolatedReader) else ()


def measure(settings: Settings, *, tell: Tell = lambda line: None) -> dict[str, Any]:
    """Everything, as JSON values; `tell` gets a line for each thing that was measured."""
    load_before, started = load_average(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        pictures = make_pictures(Path(folder), kinds=settings.kinds)
        file_bytes = {kind: int(np.mean([os.path.getsize(path) for path in pictures[kind]])) for kind in settings.kinds}
        ways = list(_ways(settings, stack))
        rows = [row for kind in settings.kinds for row in _rows(kind, pictures[kind], ways, settings, tell)]
    about = circumstances(load_before=load_before)
    return {
        "rows": rows,
        "overhead": [_overhead(kind, rows) for kind in settings.kinds],
        "file_bytes": file_bytes,
        "rounds": settings.rounds,
        "seconds": settings.seconds,
        "size": SIZE,
        "elapsed_s": time.perf_counter() - started,
        "circumstances": about | {"omp_num_threads": os.environ.get("OMP_NUM_THREADS", "unset")},
    }


def _ways(settings: Settings, stack: ExitStack) -> Iterator[Way]:
    spec = CaptionerSpec()
    for at_once in settings.at_once:
        yield Way(reader="thread", at_once=at_once, read=PictureReader(spec, size=SIZE))
        apart = IsolatedReader(spec, size=SIZE, timeout_s=TIMEOUT_S, num_processes=at_once)
        stack.callback(apart.close)
        yield Way(reader="process", at_once=at_once, read=apart)


def _rows(
    kind: str, paths: Sequence[str], ways: Sequence[Way], settings: Settings, tell: Tell
) -> Iterator[dict[str, Any]]:
    """All ways in turn, round by round, with the same number of pictures each time."""
    for way in ways:  # files into the system's memory, processes started
        _sample(way, paths, number=2 * len(paths))
    seconds = settings.seconds / settings.rounds
    alone = _sample(ways[0], paths, number=len(paths))
    number = max(MIN_PICTURES, int(seconds * alone["pictures_per_s"]))
    samples: list[list[dict[str, float]]] = [[] for _ in ways]
    for _ in range(settings.rounds):
        for way, taken in zip(ways, samples, strict=True):
            taken.append(_sample(way, paths, number=number))
    for way, taken in zip(ways, samples, strict=True):
        rates = [sample["pictures_per_s"] for sample in taken]
        row = {"pictures": kind, "reader": way.reader, "at_once": way.at_once, "num_pictures": number}
        row |= {name: float(np.median([sample[name] for sample in taken])) for name in taken[0]}
        tell(f"{kind}, {way.at_once} {way.reader}: {row['pictures_per_s']:.1f} pictures a second")
        yield row | {"rounds": rates}


def _sample(way: Way, paths: Sequence[str], *, number: int) -> dict[str, float]:
    """Read so many pictures as a job does, `at_once` of them at a time."""
    items = itertools.islice(itertools.cycle(paths), number)
    with Prefetcher(items, way.read.read, ahead=2 * way.at_once, num_threads=way.at_once) as ahead:
        cpu_s, started = _cpu_s(way.process_ids), time.perf_counter()
        taken = 0
        while readings := ahead.take(1):
            assert readings[0].error is None, readings[0].error
            taken += 1
        wall_s = time.perf_counter() - started
        cpu_s = _cpu_s(way.process_ids) - cpu_s
    return {"pictures_per_s": taken / wall_s, "cpu_ms": cpu_s / taken * 1e3}


def _cpu_s(process_ids: Sequence[int]) -> float:
    """Seconds of processor time that this process and those have had; to a hundredth for those."""
    total = time.process_time()
    for process_id in process_ids:
        fields = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _overhead(kind: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a process of its own costs a picture, by medians of rounds: each with its neighbour in time."""
    alone = {row["reader"]: row for row in rows if row["pictures"] == kind and row["at_once"] == 1}
    wall_ms = [
        1e3 / apart - 1e3 / here
        for here, apart in zip(alone["thread"]["rounds"], alone["process"]["rounds"], strict=True)
    ]
    cpu_ms = alone["process"]["cpu_ms"] - alone["thread"]["cpu_ms"]
    return {"pictures": kind, "wall_ms": float(np.median(wall_ms)), "cpu_ms": cpu_ms, "rounds": wall_ms}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and fast: does it run?")
    parser.add_argument("--seconds", type=float, help=f"of each row (default: {Settings().seconds:g})")
    parser.add_argument("--rounds", type=int, help=f"these seconds are divided into (default: {Settings().rounds})")
    parser.add_argument("--out", type=Path, help="folder of reading.json and reading.md (default: docs)")
    options = parser.parse_args(arguments)
    given = {name: getattr(options, name) for name in ("seconds", "rounds") if getattr(options, name) is not None}
    if any(value <= 0 for value in given.values()):
        parser.error("--seconds and --rounds are above 0")
    settings = dataclasses.replace(QUICK if options.quick else Settings(), **given)
    content = measure(settings, tell=lambda line: print(line, file=sys.stderr, flush=True))
    folder = options.out or (None if options.quick else DOCS)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "reading.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (folder / "reading.md").write_text(as_markdown(content), encoding="utf-8")


if __name__ == "__main__":
    main()
