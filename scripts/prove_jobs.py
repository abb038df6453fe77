"""Tests folder jobs at full size, and writes docs/jobs.json and docs/jobs.md.

Usage: python -m scripts.prove_jobs [--part kills|disks|memory|resuming|waiting ...] [--work FOLDER] [--out FOLDER]
                                    [--kills N] [--quick]

Parts that are not run keep their figures. `disks` mounts small file systems in memory and needs root. All parts
together take about 15 minutes on two cores.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_adapter.app.captioning.captioner import Captioner
from scripts.bench import run_bench
from scripts.job_proofs.disks import prove_disks
from scripts.job_proofs.drawings import write_drawings, write_variations
from scripts.job_proofs.kills import kill_again_and_again
from scripts.job_proofs.memory import time_known, watch_memory
from scripts.job_proofs.resuming import time_scan
from scripts.job_proofs.waiting import measure_waiting
from scripts.photographs import write_photographs


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is measured, and where."""

    work: Path
    kills: int = 200
    pictures: int = 300
    many: int = 10_000
    records: int = 100_000
    rounds: int = 5


def prove_kills(settings: Settings) -> dict[str, Any]:
    pictures = write_drawings(settings.work / "pictures", settings.pictures)
    report = kill_again_and_again(pictures, settings.work / "kills", kills=settings.kills, seed=1)
    return {**dataclasses.asdict(report), "most_begun_again": report.most_begun_again}


def prove_full_disk(settings: Settings) -> dict[str, Any]:
    return prove_disks(write_drawings(settings.work / "pictures", settings.pictures), settings.work / "disk")


def prove_memory(settings: Settings) -> dict[str, Any]:
    """Memory over many pictures, and the time to run the finished job again."""
    folder, out = settings.work / "many", settings.work / "many.jsonl"
    write_variations(folder, settings.many)
    samples = watch_memory(folder, out, every=settings.many // 10)
    known_s = time_known(folder, out)
    return {"num_pictures": settings.many, "samples": samples, "known_s": known_s}


def prove_waiting(settings: Settings) -> dict[str, Any]:
    """The share of a job in which the device waits for pictures."""
    kinds: dict[str, Sequence[Path]] = {
        "drawings, 224 x 224": write_drawings(settings.work / "pictures", settings.pictures),
        "JPEG, 1 megapixel": write_photographs(settings.work / "small", settings.pictures // 5, width=1152, height=864),
        "JPEG, 12 megapixels": write_photographs(
            settings.work / "large", settings.pictures // 12, width=4000, height=3000
        ),
    }
    with Captioner.load() as captioner:
        rows = measure_waiting(captioner, kinds, rounds=settings.rounds)
    return {"rounds": settings.rounds, "rows": rows}


PARTS: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "kills": prove_kills,
    "disks": prove_full_disk,
    "memory": prove_memory,
    "resuming": lambda settings: time_scan(settings.work / "records.jsonl", settings.records, rounds=settings.rounds),
    "waiting": prove_waiting,
}


def main(arguments: Sequence[str] | None = None) -> None:
    flags = {"kills": "number of kills", "work": "working folder, kept afterwards"}
    with tempfile.TemporaryDirectory(prefix="llama-adapter-jobs-", ignore_cleanup_errors=True) as work:
        full = Settings(work=Path(work))
        quick = dataclasses.replace(full, kills=4, pictures=24, many=100, records=1000, rounds=1)
        run_bench(__doc__, arguments, measure=PARTS, page="jobs", full=full, quick=quick, flags=flags)


if __name__ == "__main__":
    main()
