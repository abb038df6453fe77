"""Time and memory for scanning a large record file when a job resumes."""

import time
from pathlib import Path
from statistics import median
from typing import Any

from llama_adapter.app.jobs.records.index import RecordIndex
from llama_adapter.app.jobs.records.record import Record, json_line


def write_records(path: Path, count: int) -> None:
    """Write `count` records like those of a job, for pictures that do not exist."""
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
            file.write(json_line(record) + "\n")


def time_scan(path: Path, count: int, *, rounds: int) -> dict[str, Any]:
    """Write `count` records to `path`, and scan them `rounds` times."""
    write_records(path, count)
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        index = RecordIndex([path])
        taken.append(time.perf_counter() - started)
    assert len(index) == count
    return {
        "num_records": count,
        "file_mb": path.stat().st_size / 1e6,
        "seconds": median(taken),
        "rounds": taken,
        "index_mb": index.num_bytes / 1e6,
    }
