"""Measures how fast pictures are opened, hashed, decoded and resized, in threads and in processes.

Usage: python -m scripts.bench_reading [--seconds N] [--rounds N] [--out FOLDER] [--quick]

Writes docs/reading.json and docs/reading.md. No model is used.
"""

import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from llama_adapter.app.pictures.reading.isolated import IsolatedReader
from llama_adapter.app.pictures.reading.prefetch import Prefetcher
from llama_adapter.app.pictures.reading.reader import PictureReader, Reader
from llama_adapter.app.pictures.reading.spec import ReadingSpec
from llama_adapter.vision.pixels import PixelRule
from scripts.bench import run_bench
from scripts.common import in_turn, medians, process_cpu_s, sample_files, tell
from scripts.photographs import write_photographs

DRAWINGS = "drawings"
PHOTOGRAPHS = {"1 MP JPEG": (1152, 864), "4 MP JPEG": (2304, 1728), "12 MP JPEG": (4000, 3000)}
KINDS = (DRAWINGS, *PHOTOGRAPHS)
NUM_PHOTOGRAPHS = 4  # of each size; drawing more would take longer
SIZE = 224
TIMEOUT_S = 60.0
MIN_PICTURES = 8  # per sample, so that the end of a sample, when some threads are idle, has little effect


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is measured."""

    seconds: Annotated[float, "seconds of each row, all rounds together"] = 12.0
    rounds: Annotated[int, "rounds that the seconds are divided into"] = 6
    kinds: tuple[str, ...] = KINDS
    at_once: tuple[int, ...] = (1, 2)


QUICK = Settings(seconds=0.1, rounds=1, kinds=KINDS[:2])


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Way:
    """A reader, and the number of pictures that it reads at once."""

    reader: str  # thread or process
    at_once: int
    read: Reader

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Process ids of the reading processes, if any."""
        return self.read.process_ids if isinstance(self.read, IsolatedReader) else ()


def measure(settings: Settings) -> dict[str, Any]:
    """Measure all ways of reading for all kinds of pictures."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        pictures = {kind: _pictures(kind, Path(folder)) for kind in settings.kinds}
        file_bytes = {kind: int(np.mean([os.path.getsize(path) for path in pictures[kind]])) for kind in settings.kinds}
        ways = list(_ways(settings, stack))
        rows = [row for kind in settings.kinds for row in _rows(kind, pictures[kind], ways, settings)]
    return {
        "rows": rows,
        "overhead": [_overhead(kind, rows) for kind in settings.kinds],
        "file_bytes": file_bytes,
        "rounds": settings.rounds,
        "seconds": settings.seconds,
        "size": SIZE,
    }


def _pictures(kind: str, folder: Path) -> list[str]:
    if kind == DRAWINGS:
        return list(map(str, sample_files()))
    width, height = PHOTOGRAPHS[kind]
    return list(map(str, write_photographs(folder, NUM_PHOTOGRAPHS, width=width, height=height)))


def _ways(settings: Settings, stack: ExitStack) -> Iterator[Way]:
    spec = ReadingSpec()
    for at_once in settings.at_once:
        yield Way(reader="thread", at_once=at_once, read=PictureReader(spec, pixels=PixelRule(image_size=SIZE)))
        isolated = IsolatedReader(spec, pixels=PixelRule(image_size=SIZE), timeout_s=TIMEOUT_S, num_processes=at_once)
        stack.callback(isolated.close)
        yield Way(reader="process", at_once=at_once, read=isolated)


def _rows(kind: str, paths: Sequence[str], ways: Sequence[Way], settings: Settings) -> Iterator[dict[str, Any]]:
    """Measure all ways in turn, with the same number of pictures each time."""
    for way in ways:  # fill the page cache, start the processes
        _sample(way, paths, number=2 * len(paths))
    alone = _sample(ways[0], paths, number=len(paths))
    number = max(MIN_PICTURES, int(settings.seconds / settings.rounds * alone["pictures_per_s"]))
    for way, samples in in_turn(ways, lambda way: _sample(way, paths, number=number), rounds=settings.rounds).items():
        row = {"pictures": kind, "reader": way.reader, "at_once": way.at_once, "num_pictures": number}
        row |= medians(samples)
        tell(f"{kind}, {way.at_once} {way.reader}: {row['pictures_per_s']:.1f} pictures/s")
        yield row | {"rounds": [sample["pictures_per_s"] for sample in samples]}


def _sample(way: Way, paths: Sequence[str], *, number: int) -> dict[str, float]:
    """Read `number` pictures as a job does, `at_once` of them at a time."""
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
    """Processor seconds of this process and of `process_ids`; the latter are rounded to 0.01 s."""
    return time.process_time() + sum(map(process_cpu_s, process_ids))


def _overhead(kind: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The cost of a separate process per picture: the median difference between neighbouring rounds."""
    alone = {row["reader"]: row for row in rows if row["pictures"] == kind and row["at_once"] == 1}
    pairs = zip(alone["thread"]["rounds"], alone["process"]["rounds"], strict=True)
    wall_ms = [1e3 / isolated - 1e3 / here for here, isolated in pairs]
    cpu_ms = alone["process"]["cpu_ms"] - alone["thread"]["cpu_ms"]
    return {"pictures": kind, "wall_ms": float(np.median(wall_ms)), "cpu_ms": cpu_ms, "rounds": wall_ms}


def main(arguments: Sequence[str] | None = None) -> None:
    run_bench(__doc__, arguments, measure=measure, page="reading", full=Settings(), quick=QUICK)


if __name__ == "__main__":
    main()
