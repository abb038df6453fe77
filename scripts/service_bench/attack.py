"""Slow pictures among good requests: latency of the good ones, memory, and the time that the server takes to end."""

import asyncio
import subprocess
import time
from collections import Counter
from typing import Any

import numpy as np

from scripts.service_bench import slow_files
from scripts.service_bench.client import Reply, ask_once
from scripts.service_bench.load import Sample, run_load, shown_outcome
from scripts.service_bench.process import ServerProcess
from scripts.service_bench.questions import CAPTION, Question, Workload

_LOOK_S = 0.2
_END_LIMIT_S = 120.0  # after this time the server is killed
_ANSWER_LIMIT_S = 300.0


async def attack(
    server: ServerProcess,
    workload: Workload,
    *,
    slow: bytes,
    good: int,
    attackers: int,
    calm_s: float,
    attack_s: float,
) -> dict[str, Any]:
    """Run `good` clients alone for `calm_s` seconds, then for `attack_s` seconds with `attackers` that send `slow`."""
    calm = await run_load(server, workload, clients=good, seconds=calm_s)
    memory_mb = [server.tree_mb()]
    replies: list[Reply] = []
    tasks = [asyncio.create_task(_send_slow(server, slow, number, replies)) for number in range(attackers)]
    tasks.append(asyncio.create_task(_watch_memory(server, memory_mb)))
    under_attack = await run_load(server, workload, clients=good, seconds=attack_s)
    outcomes = Counter(shown_outcome(reply) for reply in replies)
    outcomes["under way"] = attackers - len(replies)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    ended = time.perf_counter()
    server.terminate()
    try:
        exit_code: int | None = await asyncio.to_thread(server.wait, timeout_s=_END_LIMIT_S)
    except subprocess.TimeoutExpired:
        exit_code = None
    return {
        "calm": _figures(calm),
        "under_attack": _figures(under_attack),
        "slow": {name: number for name, number in outcomes.items() if number},
        "memory_mb": memory_mb[0],
        "most_memory_mb": max(memory_mb[1:], default=0.0),
        "end_s": time.perf_counter() - ended,
        "exit_code": exit_code,
    }


async def _watch_memory(server: ServerProcess, memory_mb: list[float]) -> None:
    while True:
        memory_mb.append(await asyncio.to_thread(server.tree_mb))
        await asyncio.sleep(_LOOK_S)


async def _send_slow(server: ServerProcess, slow: bytes, number: int, replies: list[Reply]) -> None:
    picture = slow_files.changed(slow, number)
    body = Question(name="slow", picture=picture, prompt=CAPTION).body(stream=False)
    replies.append(await ask_once(server.host, server.port, body, timeout_s=_ANSWER_LIMIT_S))


def _figures(sample: Sample) -> dict[str, Any]:
    times = np.array(sample.total_s) if sample.total_s else np.array([np.inf])
    return {
        "requests_per_s": sample.num_answered / sample.seconds,
        "p99_ms": float(np.percentile(times, 99)) * 1e3,
        "num_failed": sum(sample.others.values()),
        "num_wrong": sample.num_wrong,
    }
