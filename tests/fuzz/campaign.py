"""Fuzzing campaigns: targets take turns, each in its own process, until the time is up. Campaigns can be resumed."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom

from llama_adapter.app.pictures.reading.process import ENVIRONMENT
from tests.fuzz.findings import Finding
from tests.fuzz.target import Target
from tests.fuzz.worker import CORPUS, CURRENT, FINDINGS, STATUS

_ROOT = Path(__file__).resolve().parents[2]
_START_S = 60.0  # time for importing
_LEAST_S = 10.0  # of each turn
_MOST_S = 120.0
_LOG_TAIL = 3_000


@dataclass(kw_only=True)
class Tally:
    """Results of one target in this campaign."""

    seconds: float = 0.0
    num_inputs: int = 0
    num_new: int = 0
    findings: set[str] = field(default_factory=set)  # paths of their inputs


def run_campaign(targets: list[Target], *, minutes: float, folder: Path) -> int:
    """Fuzz for `minutes`; prints a line per turn and a table at the end. Returns 1 if there are findings."""
    ends_at = time.monotonic() + minutes * 60
    turn_s = min(_MOST_S, max(_LEAST_S, minutes * 60 / len(targets)))
    # New targets first, then those whose last turn is longest ago.
    targets = sorted(targets, key=lambda target: _last_turn(folder / target.name))
    tallies = {target.name: Tally() for target in targets}
    try:
        while time.monotonic() < ends_at:
            for target in targets:
                left = ends_at - time.monotonic()
                if left < 1:
                    break
                _turn(target, tallies[target.name], folder / target.name, seconds=min(turn_s, left))
    except KeyboardInterrupt:
        print("interrupted; what was found is kept", flush=True)
    print(f"\n{_table(tallies)}")
    found = sorted(path for tally in tallies.values() for path in tally.findings)
    for path in found:
        print(f"\nfinding: {path}\n  python -m tests.fuzz replay {Path(path).name.rpartition('-')[0]} {path}")
    return 1 if found else 0


def _turn(target: Target, tally: Tally, folder: Path, *, seconds: float) -> None:
    """Run a target for one turn. A worker that is killed by an input is restarted for the remaining time."""
    ends_at = time.monotonic() + seconds
    while (left := ends_at - time.monotonic()) >= 1 and _work(target, tally, folder, seconds=left):
        pass
    name = f"{target.name:20}"
    print(f"{name} {tally.num_inputs:>9,} inputs, {tally.num_new:,} new, {len(tally.findings)} findings", flush=True)


def _work(target: Target, tally: Tally, folder: Path, *, seconds: float) -> bool:
    """Run one worker; returns whether an input has ended it, so that another one should go on."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (STATUS, CURRENT):
        (folder / name).unlink(missing_ok=True)
    before = {path.name for path in (folder / CORPUS).glob("*")}
    scratch = tempfile.mkdtemp(prefix="llama-adapter-fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    command = [sys.executable, "-m", "tests.fuzz.worker", target.room, target.name, str(folder), f"{seconds:.1f}"]
    command.append(str(SystemRandom().randrange(1, 2**31)))
    environment = {**os.environ, "FUZZ_SCRATCH": scratch, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **ENVIRONMENT}
    started = time.monotonic()
    try:
        with open(folder / "log", "w+b") as log:
            # Decoders write to the log.
            process = subprocess.Popen(
                command, cwd=_ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            code: int | None = None
            try:
                with suppress(subprocess.TimeoutExpired):  # the worker's own timeout could not end it
                    code = process.wait(timeout=seconds + _START_S + 4 * target.limit_s)
            finally:
                process.kill()
                process.wait()
            log.seek(0)
            said = log.read().decode(errors="replace")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    tally.seconds += time.monotonic() - started
    if not (folder / STATUS).exists():  # no input was tried
        raise SystemExit(f"The worker of {target.name} does not start:\n{said[-_LOG_TAIL:]}")
    tally.num_inputs += int((folder / STATUS).read_text())
    tally.num_new += len({path.name for path in (folder / CORPUS).glob("*")} - before)
    tally.findings |= {str(path) for path in (folder / FINDINGS).glob("*") if path.suffix != ".txt"}
    if code == 0:
        return False
    if code == 1 and "Timeout (" not in said:  # an exception in the worker itself, not in the target
        raise SystemExit(f"The worker of {target.name} failed:\n{said[-_LOG_TAIL:]}")
    path = _ended_by(target, folder, code=code, said=said).save(folder / FINDINGS)
    tally.findings.add(str(path))
    return True


def _ended_by(target: Target, folder: Path, *, code: int | None, said: str) -> Finding:
    """A finding for the input that killed a worker, by a signal or a timeout."""
    if "Timeout (" in said or code is None:
        stack = said.rpartition("Timeout (")[2]
        own = [line.strip() for line in stack.splitlines() if "/.venv/" not in line and f"{_ROOT}/" in line]
        signature = f"takes more than {target.limit_s:g} s: {own[0].replace(f'{_ROOT}/', '') if own else 'somewhere'}"
    else:
        signature = f"ends the process with {code}"
    return Finding(target.name, signature, (folder / CURRENT).read_bytes(), said[-_LOG_TAIL:])


def _last_turn(folder: Path) -> float:
    try:
        return (folder / STATUS).stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _table(tallies: dict[str, Tally]) -> str:
    """A Markdown table with one row per target."""
    lines = [
        "| target | minutes | inputs | inputs/s | new in corpus | findings |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, tally in tallies.items():
        rate = tally.num_inputs / tally.seconds if tally.seconds else 0.0
        lines.append(
            f"| {name} | {tally.seconds / 60:.1f} | {tally.num_inputs:,} | {rate:,.0f} | "
            f"{tally.num_new:,} | {len(tally.findings)} |"
        )
    total = sum(tally.num_inputs for tally in tallies.values())
    minutes = sum(tally.seconds for tally in tallies.values()) / 60
    found = sum(len(tally.findings) for tally in tallies.values())
    return "\n".join([*lines, f"| all | {minutes:.1f} | {total:,} | | | {found} |"])
