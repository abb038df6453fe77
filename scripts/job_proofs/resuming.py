"""The cost of resuming with a large file of records."""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from llama_adapter.app.records.index import RecordIndex
from llama_adapter.app.records.record import Record, record_to_line

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanFigures:
    """Figures of reading a file of records at the start of a run."""

    num_records: int
    file_mb: float
    seconds: float  # the median
    rounds: list[float]
    index_mb: float  # what stays in memory


def write_records(path: Path, count: int) -> None:
    """Write records as a job does, of pictures that do not exist."""
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            record = Record(
                id=f"{number * 2654435761 % 2**128:032x}",
                picture=f"/data/pictures/folder-{number // 1000:04d}/{number:08d}.jpg",
                prompt="Generate caption of this image",
                text="a large red star at the left, a small blue ring at the bottom",
                finish="stop",
                choice=None,
                tokens=16,
                error=None,
                ms={"read": 1.192, "clip": 24.777, "first_token": 34.959, "total": 38.393},
                run="20260101T000000Z-00000000",
            )
            file.write(record_to_line(record) + "\n")


def time_scan(path: Path, count: int, *, rounds: int) -> ScanFigures:
    """Time reading a file of `count` records, written to `path`."""
    write_records(path, count)
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        index = RecordIndex([path])
        taken.append(time.perf_counter() - started)
    assert len(index) == count
    return ScanFigures(
        num_records=count,
        file_mb=path.stat().st_size / 1e6,
        seconds=median(taken),
        rounds=taken,
        index_mb=index.num_bytes / 1e6,
    )


def time_known(folder: Path, out: Path) -> float:
    """Seconds of a whole run with nothing left to do, including start and loading."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "llama_adapter", "caption", str(folder), "--out", str(out), "--quiet"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started
