"""Memory of a long job while it runs, and the time for running a finished job again."""

import subprocess
import time
from pathlib import Path

from scripts.common import ROOT, caption_command, process_mib, watched_job


def watch_memory(folder: Path, out: Path, *, every: int) -> list[dict[str, float]]:
    """Run a job over a folder, and take a memory sample every `every` records. Raises RuntimeError if the job fails."""
    samples: list[dict[str, float]] = []
    due = every
    for process, num_records in watched_job(folder, out):
        if num_records >= due and Path(f"/proc/{process}").exists():
            samples.append(_sample(process, num_records))
            due = (num_records // every + 1) * every
    return samples


def time_known(folder: Path, out: Path) -> float:
    """Seconds of a whole run of a finished job, startup included."""
    started = time.perf_counter()
    subprocess.run([*caption_command(folder, out), "--quiet"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def _sample(process: int, num_records: int) -> dict[str, float]:
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return {
        "num_records": num_records,
        "own_mib": _resident_mib(process),
        "readers_mib": sum(_resident_mib(int(child)) for child in children),
    }


def _resident_mib(process: int) -> float:
    """Resident memory in MiB; 0 if the process has just ended."""
    try:
        return process_mib(process)
    except OSError:
        return 0.0
