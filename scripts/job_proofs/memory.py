"""Memory of a long job while it runs: of the process itself, and of those that read pictures for it."""

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySample:
    """Resident memory after a number of records."""

    num_records: int
    own_mib: float
    readers_mib: float


def watch_memory(folder: Path, out: Path, *, every: int, flags: Sequence[str] = ()) -> list[MemorySample]:
    """Run a job over a folder and look after each `every` records. Raises RuntimeError if it fails."""
    command = [sys.executable, "-m", "llama_adapter", "caption", str(folder), "--out", str(out), "--quiet", *flags]
    samples: list[MemorySample] = []
    num_records, offset, due = 0, 0, every
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if out.exists():
                with open(out, "rb") as file:
                    file.seek(offset)
                    new = file.read()
                num_records, offset = num_records + new.count(b"\n"), offset + len(new)
            if num_records >= due:
                samples.append(_sample(process.pid, num_records))
                due = (num_records // every + 1) * every
            time.sleep(0.02)
    if process.returncode:
        raise RuntimeError(f"the job ended with exit code {process.returncode}")
    return samples


def _sample(process: int, num_records: int) -> MemorySample:
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return MemorySample(
        num_records=num_records,
        own_mib=_resident(process) / MIB,
        readers_mib=sum(_resident(int(child)) for child in children) / MIB,
    )


def _resident(process: int) -> int:
    """Bytes; 0 of a process that has just ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)
