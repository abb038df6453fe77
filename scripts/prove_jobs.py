"""Tests folder jobs at full size, and writes docs/jobs.json and docs/jobs.md.

Usage: python -m scripts.prove_jobs [--part kills|disks|memory|resuming|waiting|ray ...] [--work FOLDER] [--out FOLDER]
                                    [--kills N] [--quick]

Parts that are not run keep their figures. `disks` mounts small file systems in memory and needs root. All parts
together take about 20 minutes on two cores.
"""

import dataclasses
import itertools
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.stage_clock import StageClock
from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.captioning.work_items import WorkItem, WorkQuestion
from llama_adapter.app.jobs.records.index import RecordIndex
from llama_adapter.app.jobs.records.record import Record, json_line, read_records
from llama_adapter.app.pictures.reading.isolated import IsolatedReader
from llama_adapter.app.pictures.reading.reader import PictureReader, Reader
from llama_adapter.llm.engine.sampling_params import SamplingParams
from scripts.bench import Measure, run_bench
from scripts.common import ROOT, caption_command, child_processes, in_turn, medians, process_mib, watched_job
from scripts.job_proofs.drawings import write_drawings, write_variations
from scripts.job_proofs.kills import kill_again_and_again
from scripts.job_proofs.ray import compare_jobs
from scripts.photographs import write_photographs


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is measured, and where."""

    work: Annotated[Path, "working folder, kept afterwards"]
    kills: Annotated[int, "number of kills"] = 200
    pictures: int = 300
    many: int = 10_000
    records: int = 100_000
    rounds: int = 5
    ray_pictures: int = 2240
    ray_rounds: int = 3


def prove_kills(settings: Settings) -> dict[str, Any]:
    pictures = write_drawings(settings.work / "pictures", settings.pictures)
    report = kill_again_and_again(pictures, settings.work / "kills", kills=settings.kills, seed=1)
    return {**dataclasses.asdict(report), "most_begun_again": report.most_begun_again}


@contextmanager
def mounted(place: Path, options: str) -> Iterator[None]:
    """Mount a file system in memory. Raises OSError without permission to mount."""
    place.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def prove_disks(settings: Settings) -> dict[str, Any]:
    """Fill a disk with a job, enlarge the disk, resume the job; then try a read-only disk."""
    pictures = write_drawings(settings.work / "pictures", settings.pictures)
    place = settings.work / "disk"
    out = place / "answers.jsonl"
    command = caption_command(pictures[0].parent, out)
    with mounted(place, "size=64k"):
        full = _run_captured(command)
        left = out.read_bytes()
        kept = len(list(read_records(out)))
        subprocess.run(["mount", "-o", "remount,size=16m", str(place)], check=True)
        completed = _run_captured(command)
        answered = [record["picture"] for record in read_records(out)]
    with mounted(place, "ro"):
        read_only = _run_captured(command)
    return {
        "num_pictures": len(pictures),
        "full_exit_code": full.returncode,
        "full_said": _error_line(full.stderr, place=place),
        "records_kept": kept,
        "is_whole": left.endswith(b"\n"),  # the file on the full disk ends with a whole record
        "completed_exit_code": completed.returncode,
        "lost": len({str(path) for path in pictures} - set(answered)),
        "doubled": len(answered) - len(set(answered)),
        "read_only_exit_code": read_only.returncode,
        "read_only_said": _error_line(read_only.stderr, place=place),
    }


def _run_captured(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def _error_line(said: str, *, place: Path) -> str:
    told = next((line for line in said.splitlines() if line.startswith("error:")), "")
    return told.replace(str(place), "/disk")


def prove_memory(settings: Settings) -> dict[str, Any]:
    """Memory of a job over many pictures, ten samples of it, and the time to run the finished job again."""
    folder, out = settings.work / "many", settings.work / "many.jsonl"
    write_variations(folder, settings.many)
    samples: list[dict[str, float]] = []
    due = every = settings.many // 10
    for process, num_records in watched_job(folder, out):
        if num_records >= due:
            due = (num_records // every + 1) * every
            with suppress(OSError):  # the job has just ended
                readers_mib = sum(map(process_mib, child_processes(process)))
                samples.append(
                    {"num_records": num_records, "own_mib": process_mib(process), "readers_mib": readers_mib}
                )
    started = time.perf_counter()
    subprocess.run([*caption_command(folder, out), "--quiet"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return {"num_pictures": settings.many, "samples": samples, "known_s": time.perf_counter() - started}


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
        "seconds": statistics.median(taken),
        "rounds": taken,
        "index_mb": index.num_bytes / 1e6,
    }


def prove_waiting(settings: Settings) -> dict[str, Any]:
    """The share of a job in which the device waits for pictures: each kind of picture with each reader, in turn."""
    small, large = settings.pictures // 5, settings.pictures // 12
    kinds: dict[str, Sequence[Path]] = {
        "drawings, 224 x 224": write_drawings(settings.work / "pictures", settings.pictures),
        "JPEG, 1 megapixel": write_photographs(settings.work / "small", small, width=1152, height=864),
        "JPEG, 12 megapixels": write_photographs(settings.work / "large", large, width=4000, height=3000),
    }
    with Captioner.load() as captioner:
        spec, pixels = captioner.spec.pictures, captioner.pixels
        readers: dict[str, Reader] = {
            "thread": PictureReader(spec, pixels=pixels),
            "process": IsolatedReader(spec, pixels=pixels, timeout_s=60.0),
        }
        ways = list(itertools.product(kinds, readers))
        with closing(readers["thread"]), closing(readers["process"]):
            for kind, name in ways:  # warm up
                _caption(captioner, kinds[kind], readers[name])
            taken = in_turn(
                ways, lambda way: _caption(captioner, kinds[way[0]], readers[way[1]]), rounds=settings.rounds
            )
    rows = [
        {
            "pictures": kind,
            "reader": name,
            **medians(each),
            "rounds": [one["pictures_per_s"] for one in each],
        }
        for (kind, name), each in taken.items()
    ]
    return {"rounds": settings.rounds, "rows": rows}


def _caption(captioner: Captioner, paths: Sequence[Path], reader: Reader) -> dict[str, float]:
    """Pictures per second, and the share of the wall time without a picture."""
    prompt = captioner.info.default_prompt
    items = (
        WorkItem(picture=path, label=path.name, questions=(WorkQuestion(index=index, prompt=prompt),))
        for index, path in enumerate(paths)
    )
    clock = StageClock()
    started = time.perf_counter()
    events = captioner.run(items, sampling=SamplingParams(), clock=clock, reader=reader)
    answers = [event for event in events if isinstance(event, Answer)]
    wall_s = time.perf_counter() - started
    assert len(answers) == len(paths)
    assert all(answer.error is None for answer in answers)
    return {"pictures_per_s": len(paths) / wall_s, "waited": clock.seconds["read"] / wall_s}


PARTS: dict[str, Measure] = {
    "kills": prove_kills,
    "disks": prove_disks,
    "memory": prove_memory,
    "resuming": lambda settings: time_scan(settings.work / "records.jsonl", settings.records, rounds=settings.rounds),
    "waiting": prove_waiting,
    "ray": lambda settings: compare_jobs(settings.work, number=settings.ray_pictures, rounds=settings.ray_rounds),
}


def main(arguments: Sequence[str] | None = None) -> None:
    with tempfile.TemporaryDirectory(prefix="llama-adapter-jobs-", ignore_cleanup_errors=True) as work:
        full = Settings(work=Path(work))
        quick = dataclasses.replace(full, kills=4, pictures=24, many=100, records=1000, rounds=1)
        quick = dataclasses.replace(quick, ray_pictures=28, ray_rounds=1)
        run_bench(__doc__, arguments, measure=PARTS, page="jobs", packages={"ray": ("ray",)}, full=full, quick=quick)


if __name__ == "__main__":
    main()
