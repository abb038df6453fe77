"""Tests the promises about folder jobs, and writes docs/jobs.json and docs/jobs.md.

Usage: python -m scripts.prove_jobs [--part kills|disks|memory|resuming|waiting ...] [--work FOLDER] [--out FOLDER]
                                    [--kills N]

Other parts keep their figures. `disks` mounts small file systems in memory and needs root. All parts take about a
quarter of an hour on two cores.
"""

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.measuring.circumstances import circumstances, load_average
from scripts.job_proofs.disks import prove_disks
from scripts.job_proofs.drawings import write_drawings, write_variations
from scripts.job_proofs.kills import kill_again_and_again
from scripts.job_proofs.memory import watch_memory
from scripts.job_proofs.page import as_markdown
from scripts.job_proofs.resuming import time_known, time_scan
from scripts.job_proofs.waiting import measure_waiting, write_photographs

DOCS = Path(__file__).resolve().parents[1] / "docs"
NUM_PICTURES, NUM_MANY, NUM_RECORDS = 300, 10_000, 100_000

Tell = Callable[[str], None]


def prove_kills(work: Path, *, kills: int, tell: Tell) -> dict[str, Any]:
    """Kill a job at random moments."""
    pictures = write_drawings(work / "pictures", NUM_PICTURES)
    report = kill_again_and_again(pictures, work / "kills", kills=kills, seed=1, tell=tell)
    return {**dataclasses.asdict(report), "most_begun_again": report.most_begun_again}


def prove_full_disk(work: Path, *, kills: int, tell: Tell) -> dict[str, Any]:
    """A full disk and a read-only one."""
    return dataclasses.asdict(prove_disks(write_drawings(work / "pictures", NUM_PICTURES), work / "disk"))


def prove_memory(work: Path, *, kills: int, tell: Tell) -> dict[str, Any]:
    """Memory over many pictures, then the time of a second run with nothing left to do."""
    write_variations(work / "many", NUM_MANY)
    out = work / "many.jsonl"
    samples = watch_memory(work / "many", out, every=1000)
    known_s = time_known(work / "many", out)
    return {"num_pictures": NUM_MANY, "samples": [dataclasses.asdict(sample) for sample in samples], "known_s": known_s}


def prove_resuming(work: Path, *, kills: int, tell: Tell) -> dict[str, Any]:
    """The time to read a large file of records on resume."""
    return dataclasses.asdict(time_scan(work / "records.jsonl", NUM_RECORDS, rounds=7))


def prove_waiting(work: Path, *, kills: int, tell: Tell) -> dict[str, Any]:
    """The share of a job that the device waits for pictures."""
    kinds: dict[str, Sequence[Path]] = {
        "drawings, 224 x 224": write_drawings(work / "pictures", NUM_PICTURES),
        "JPEG, 1 megapixel": write_photographs(work / "small", 60, megapixels=1),
        "JPEG, 12 megapixels": write_photographs(work / "large", 24, megapixels=12),
    }
    with Captioner.load() as captioner:
        rows = measure_waiting(captioner, kinds, rounds=5)
    return {"rounds": 5, "rows": [dataclasses.asdict(row) for row in rows]}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "kills": prove_kills,
    "disks": prove_full_disk,
    "memory": prove_memory,
    "resuming": prove_resuming,
    "waiting": prove_waiting,
}


def write_part(name: str, content: dict[str, Any], folder: Path) -> None:
    """Put one part into jobs.json, keep the others, and write jobs.md."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "jobs.json"
    whole = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    whole[name] = content
    file.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    (folder / "jobs.md").write_text(as_markdown(whole), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prove and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="which; repeat it for more (default: all)")
    parser.add_argument("--kills", type=int, default=200, help="(default: %(default)s)")
    parser.add_argument("--work", type=Path, help="folder to work in, kept (default: one that is removed)")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of jobs.json and jobs.md (default: docs)")
    options = parser.parse_args(arguments)
    work = options.work or Path(tempfile.mkdtemp(prefix="llama-adapter-jobs-"))
    tell: Tell = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    try:
        for name in options.part or PARTS:
            load_before = load_average()
            tell(f"{name} ...")
            content = PARTS[name](work, kills=options.kills, tell=tell)
            write_part(name, content | {"circumstances": circumstances(load_before=load_before)}, options.out)
    finally:
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
