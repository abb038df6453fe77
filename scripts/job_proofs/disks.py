"""Jobs on a full disk and on a read-only disk: small file systems in memory."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llama_adapter.app.jobs.records.record import read_records
from scripts.common import ROOT, caption_command


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


def prove_disks(pictures: list[Path], place: Path) -> dict[str, Any]:
    """Fill a disk with a job, enlarge the disk, resume the job; then try a read-only disk."""
    out = place / "answers.jsonl"
    command = caption_command(pictures[0].parent, out)
    with mounted(place, "size=64k"):
        full = _run(command)
        left = out.read_bytes()
        kept = len(list(read_records(out)))
        subprocess.run(["mount", "-o", "remount,size=16m", str(place)], check=True)
        completed = _run(command)
        answered = [record["picture"] for record in read_records(out)]
    with mounted(place, "ro"):
        read_only = _run(command)
    return {
        "num_pictures": len(pictures),
        "full_exit_code": full.returncode,
        "full_said": _error(full.stderr, place=place),
        "records_kept": kept,
        "is_whole": left.endswith(b"\n"),  # the file on the full disk ends with a whole record
        "completed_exit_code": completed.returncode,
        "lost": len({str(path) for path in pictures} - set(answered)),
        "doubled": len(answered) - len(set(answered)),
        "read_only_exit_code": read_only.returncode,
        "read_only_said": _error(read_only.stderr, place=place),
    }


def _run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def _error(said: str, *, place: Path) -> str:
    told = next((line for line in said.splitlines() if line.startswith("error:")), "")
    return told.replace(str(place), "/disk")
