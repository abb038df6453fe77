"""Kills a job repeatedly at random moments, and checks its record file each time."""

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llama_adapter.app.jobs.records.record import parse_record, read_records
from scripts.common import ROOT

_START_S = 3.0  # about the time that a run needs to start and answer some pictures


@dataclass(kw_only=True, slots=True)
class KillReport:
    """Counts over all jobs; all counts after `most_begun_again` should be zero."""

    num_pictures: int
    kills: int = 0  # kills of runs that had not ended
    most_begun_again: int = 0  # after one kill: pictures that were begun without a record
    lost: int = 0
    doubled: int = 0
    different: int = 0  # answers that differ from an undisturbed run
    unreadable_lines: int = 0
    failed_runs: list[str] = field(default_factory=list)


def kill_again_and_again(
    pictures: Sequence[Path],
    work: Path,
    *,
    kills: int,
    seed: int,
    batch_size: int = 8,
) -> KillReport:
    """Run jobs over the folder of `pictures`, kill them with SIGKILL `kills` times in all, and resume each of them.

    Half of the kills come at a random moment in the first seconds of a run, half right after a random missing record.
    """
    draw = random.Random(seed)
    work.mkdir(parents=True, exist_ok=True)
    folder = pictures[0].parent
    command = ["caption", str(folder), "--quiet", "--batch-size", str(batch_size)]
    undisturbed = work / "undisturbed.jsonl"
    _run(work, undisturbed, command).wait()
    expected = {record["picture"]: record["text"] for record in read_records(undisturbed)}
    assert set(expected) == {str(path) for path in pictures}, "the undisturbed run answers every picture"
    report = KillReport(num_pictures=len(pictures))
    out = work / "killed.jsonl"
    while report.kills < kills:
        _one_run(report, work, out, command, draw=draw)
        if out.exists() and len(_lines(out)) >= len(expected):
            _settle(report, work, out, command, expected=expected)
    if out.exists():
        _settle(report, work, out, command, expected=expected)
    return report


def _one_run(report: KillReport, work: Path, out: Path, command: Sequence[str], *, draw: random.Random) -> None:
    before = len(_lines(out)) if out.exists() else 0
    wanted = before + draw.randrange(0, max(report.num_pictures - before, 1)) if draw.random() < 0.5 else None
    ends_by = time.monotonic() + (60.0 if wanted is not None else draw.uniform(0.0, _START_S))
    process = _run(work, out, command)
    while process.poll() is None and time.monotonic() < ends_by:
        if wanted is not None and out.exists() and out.read_bytes().count(b"\n") > wanted:
            time.sleep(draw.uniform(0.0, 0.01))
            break
        time.sleep(0.001)
    process.kill()
    if process.wait() == -9:
        report.kills += 1
        _look(report, work, out)
    elif process.returncode != 0:
        report.failed_runs.append(f"exit code {process.returncode}: {(work / 'stderr').read_text()[-300:]}")


def _run(work: Path, out: Path, command: Sequence[str]) -> "subprocess.Popen[bytes]":
    log = work / "begun"
    log.unlink(missing_ok=True)
    program = [sys.executable, "-m", "tests.e2e.noting", str(log), *command, "--out", str(out)]
    with open(work / "stderr", "wb") as errors:
        return subprocess.Popen(program, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors)


def _look(report: KillReport, work: Path, out: Path) -> None:
    """Check the file right after a kill: count whole lines that are no records, and pictures begun without a record."""
    lines = _lines(out) if out.exists() else []
    records = [parse_record(line) for line in lines]
    report.unreadable_lines += sum(record is None for record in records)
    answered = {record["picture"] for record in records if record is not None}
    log = work / "begun"
    begun = set(log.read_text().splitlines()) if log.exists() else set()
    report.most_begun_again = max(report.most_begun_again, len(begun - answered))


def _settle(report: KillReport, work: Path, out: Path, command: Sequence[str], *, expected: dict[str, str]) -> None:
    """Let a job finish, compare its answers, and delete it."""
    process = _run(work, out, command)
    if process.wait() != 0:
        report.failed_runs.append(f"exit code {process.returncode}: {(work / 'stderr').read_text()[-300:]}")
    answers = [(record["picture"], record["text"]) for record in read_records(out)]
    counts = Counter(picture for picture, _ in answers)
    report.lost += len(expected.keys() - counts.keys())
    report.doubled += sum(count - 1 for count in counts.values())
    report.different += sum(expected.get(picture) != text for picture, text in answers)
    out.unlink()
    out.with_name(f"{out.name}.manifest.json").unlink()


def _lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
