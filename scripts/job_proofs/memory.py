"""Memory of a long job while it runs, and the time for running a finished job again."""

import subprocess
import sys
import time
from pathlib import Path

from scripts.common import ROOT, process_mib


def watch_memory(folder: Path, out: Path, *, every: int) -> list[dict[str, float]]:
    """Run a job over a folder, with a sample every `every` records. Raises RuntimeError if it fails."""
    command = [sys.executable, "-m", "llama_adapter", "caption", str(folder), "--out", str(out), "--quiet"]
    samples: list[dict[str, float]] = []
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


def time_known(folder: Path, out: Path) -> float:
    """Seconds of a whole run of a finished job, startup included."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "llama_adapter", "caption", str(folder), "--out", str(out), "--quiet"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def _sample(process: int, num_records: int) -> dict[str, float]:
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return {
        "num_records": num_records,
        "own_mib": _resident_mib(process),
        "readers_mib": sum(_resident_mib(int(child)) for child in children),
    }


def _resident_mib(process: int) -> float:
    """0 if the process has just ended."""
    try:
        return process_mib(process)
    except OSError:
        return 0.0
