"""Tests folder jobs at full size, and writes docs/jobs.json and docs/jobs.md.

Usage: python -m scripts.prove_jobs [--part kills|disks|memory|resuming|waiting ...] [--work FOLDER] [--out FOLDER]
                                    [--kills N]

Other parts keep their figures. `disks` mounts small file systems in memory and needs root. All parts together take
about 15 minutes on two cores.
"""

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.measuring.report import circumstances, load_average
from scripts.common import add_out, parser_of, tell
from scripts.job_proofs.disks import prove_disks
from scripts.job_proofs.drawings import write_drawings, write_variations
from scripts.job_proofs.kills import kill_again_and_again
from scripts.job_proofs.memory import time_known, watch_memory
from scripts.job_proofs.resuming import time_scan
from scripts.job_proofs.waiting import measure_waiting
from scripts.pages.render import save_part
from scripts.photographs import write_photographs

NUM_PICTURES, NUM_MANY, NUM_RECORDS = 300, 10_000, 100_000


def prove_kills(work: Path, kills: int) -> dict[str, Any]:
    pictures = write_drawings(work / "pictures", NUM_PICTURES)
    report = kill_again_and_again(pictures, work / "kills", kills=kills, seed=1, tell=tell)
    return {**dataclasses.asdict(report), "most_begun_again": report.most_begun_again}


def prove_full_disk(work: Path, kills: int) -> dict[str, Any]:
    return prove_disks(write_drawings(work / "pictures", NUM_PICTURES), work / "disk")


def prove_memory(work: Path, kills: int) -> dict[str, Any]:
    """Memory over many pictures, and the time for running the finished job again."""
    write_variations(work / "many", NUM_MANY)
    out = work / "many.jsonl"
    samples = watch_memory(work / "many", out, every=1000)
    known_s = time_known(work / "many", out)
    return {"num_pictures": NUM_MANY, "samples": samples, "known_s": known_s}


def prove_resuming(work: Path, kills: int) -> dict[str, Any]:
    return time_scan(work / "records.jsonl", NUM_RECORDS, rounds=7)


def prove_waiting(work: Path, kills: int) -> dict[str, Any]:
    """The share of a job in which the device waits for pictures."""
    kinds: dict[str, Sequence[Path]] = {
        "drawings, 224 x 224": write_drawings(work / "pictures", NUM_PICTURES),
        "JPEG, 1 megapixel": write_photographs(work / "small", 60, width=1152, height=864),
        "JPEG, 12 megapixels": write_photographs(work / "large", 24, width=4000, height=3000),
    }
    with Captioner.load() as captioner:
        rows = measure_waiting(captioner, kinds, rounds=5)
    return {"rounds": 5, "rows": rows}


PARTS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "kills": prove_kills,
    "disks": prove_full_disk,
    "memory": prove_memory,
    "resuming": prove_resuming,
    "waiting": prove_waiting,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="part to run; may be repeated (default: all)")
    parser.add_argument("--kills", type=int, default=200, help="number of kills (default: %(default)s)")
    parser.add_argument("--work", type=Path, help="working folder, kept afterwards (default: a temporary one)")
    add_out(parser, "jobs")
    options = parser.parse_args(arguments)
    work = options.work or Path(tempfile.mkdtemp(prefix="llama-adapter-jobs-"))
    try:
        for name in options.part or PARTS:
            load_before = load_average()
            tell(f"{name} ...")
            content = PARTS[name](work, options.kills)
            content["circumstances"] = circumstances(load_before=load_before)
            save_part("jobs", name, content, options.out)
    finally:
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
