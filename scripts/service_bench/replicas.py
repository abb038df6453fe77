"""The service over replicas: its rate compared with one process, and a replica killed during a load."""

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.common import in_turn, process_cpu_s, tell
from scripts.service_bench.client import Reply
from scripts.service_bench.load import (
    TIMEOUT_S,
    Sample,
    keep_asking,
    percentiles_ms,
    run_load,
    shown_outcome,
    summary,
    warm_up,
)
from scripts.service_bench.process import ServerProcess
from scripts.service_bench.questions import Workload

READY = re.compile(r"replica (\S+) is ready: process (\d+) on ")
READY_S = 180.0  # time limit for a replica to load the model


def flags_of(replicas: int) -> tuple[str, ...]:
    """Flags of a server with this many replicas; with 0, the model is in the server's process."""
    return ("--engine", "ray", "--ray-address", "local", "--replicas", str(replicas)) if replicas else ()


def ever_ready(server: ServerProcess) -> dict[str, int]:
    """The processes of all replicas that have been ready so far, by name. Some may have ended."""
    return {match[1]: int(match[2]) for line in list(server.lines) if (match := READY.search(line))}


def replicas_of(server: ServerProcess) -> dict[str, int]:
    """The processes of the replicas that have been ready and have not ended, by name."""
    return {name: pid for name, pid in ever_ready(server).items() if is_alive(pid)}


def is_alive(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    return False


def wait_for_replicas(server: ServerProcess, number: int) -> None:
    """Wait until `number` replicas have been ready, including those that have ended. Raises TimeoutError."""
    deadline = time.monotonic() + READY_S
    while len(ever_ready(server)) < number:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{number} replicas are not ready after {READY_S:g} s")
        time.sleep(0.02)


def measure_rates(
    workloads: Mapping[str, Workload], *, numbers: Sequence[int], clients: Sequence[int], rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Rows of all loads; `workloads` are of new and of known pictures. Each round starts fresh servers."""

    def run(number: int) -> list[tuple[str, Sample, float]]:
        with ServerProcess(*flags_of(number)) as server:
            wait_for_replicas(server, number)
            pids = replicas_of(server).values()
            samples = []
            for pictures, workload in workloads.items():
                asyncio.run(warm_up(server, workload, number=2 * workload.num_questions))
                for count in clients:
                    before = sum(map(process_cpu_s, pids))
                    sample = asyncio.run(run_load(server, workload, clients=count, seconds=seconds))
                    share = (sum(map(process_cpu_s, pids)) - before) / seconds
                    samples.append((pictures, sample, share))
            if number:
                end(server)
        return samples

    found = in_turn(numbers, run, rounds=rounds)
    rows = []
    for number, per_round in found.items():
        for same in zip(*per_round, strict=True):
            kinds, samples, shares = zip(*same, strict=True)
            row = summary(samples) | {"replicas": number, "pictures": kinds[0]}
            row["replicas_cpu_share"] = sum(shares) / len(shares)
            rows.append(row)
            tell(f"{number} replicas, {row['pictures']}, {row['clients']} clients: {row['requests_per_s']:.1f}/s")
    return rows


def end(server: ServerProcess) -> int:
    """End a server with SIGTERM, so that its cluster also ends; returns its exit code."""
    server.terminate()
    return server.wait(timeout_s=TIMEOUT_S)


def measure_kill(workload: Workload, *, clients: int, seconds: float, after_s: float) -> dict[str, Any]:
    """Run a load through two replicas, and kill one of them after `after_s`."""
    with ServerProcess(*flags_of(2)) as server:
        wait_for_replicas(server, 2)
        asyncio.run(warm_up(server, workload, number=2 * workload.num_questions))
        pid = next(iter(replicas_of(server).values()))
        replies, killed_at, ready_at = asyncio.run(
            _kill_under_load(server, workload, pid=pid, clients=clients, seconds=seconds, after_s=after_s)
        )
        exit_code = end(server)
    across = [reply for _, reply in replies if reply.started < killed_at < reply.started + reply.total_s]
    times = {"before": (killed_at - after_s, killed_at), "without": (killed_at, ready_at)}
    times["after"] = (ready_at, killed_at - after_s + seconds)
    rates = {}
    for name, (begin, until) in times.items():
        ended = [reply for _, reply in replies if begin <= reply.started + reply.total_s < until]
        rates[name] = len(ended) / (until - begin) if until > begin else None
    return {
        "clients": clients,
        "requests": len(replies),
        "outcomes": dict(Counter(shown_outcome(reply) for _, reply in replies)),
        "across": dict(Counter(shown_outcome(reply) for reply in across)),
        "across_ms": percentiles_ms([reply.total_s for reply in across]),
        "num_wrong": sum(
            reply.text != workload.expected[index] for index, reply in replies if reply.outcome == "answered"
        ),
        "rates": rates,
        "replaced_s": ready_at - killed_at,
        "exit_code": exit_code,
    }


async def _kill_under_load(
    server: ServerProcess, workload: Workload, *, pid: int, clients: int, seconds: float, after_s: float
) -> tuple[list[tuple[int, Reply]], float, float]:
    """All replies, and the times (`time.perf_counter()`) when the replica was killed and another one was ready."""
    replies: list[tuple[int, Reply]] = []
    deadline = time.perf_counter() + seconds
    at_work = asyncio.gather(*(keep_asking(server, workload, replies, deadline=deadline) for _ in range(clients)))
    await asyncio.sleep(after_s)
    num_ready = len(ever_ready(server))
    os.kill(pid, signal.SIGKILL)
    killed_at = time.perf_counter()
    await asyncio.to_thread(wait_for_replicas, server, num_ready + 1)
    ready_at = time.perf_counter()
    await at_work
    return replies, killed_at, ready_at
