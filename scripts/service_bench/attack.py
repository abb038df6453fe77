"""Slow pictures among good requests: what the good ones wait, what memory is taken, and how soon the server ends."""

import asyncio
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from scripts.service_bench import slow_files
from scripts.service_bench.client import Reply, ask_once
from scripts.service_bench.load import Sample, run_load, shown_outcome
from scripts.service_bench.process import ServerProcess
from scripts.service_bench.questions import CAPTION, Question, Workload

_LOOK_S = 0.2
_END_LIMIT_S = 120.0  # a server that has not ended by then is killed
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
    expected: Sequence[str],
) -> dict[str, Any]:
    """`good` clients alone for `calm_s`, and for `attack_s` beside `attackers` that send the picture `slow` each."""
    calm = await run_load(server, workload, clients=good, seconds=calm_s, expected=expected)
    before_mb = server.tree_mb()
    replies: list[Reply] = []
    attacks = [asyncio.create_task(_send_slow(server, slow, number, replies)) for number in range(attackers)]
    memory = asyncio.create_task(_most_memory(server))
    under_attack = await run_load(server, workload, clients=good, seconds=attack_s, expected=expected)
    memory.cancel()
    outcomes = Counter(shown_outcome(reply) for reply in replies)
    outcomes["under way"] = attackers - len(replies)
    for task in attacks:
        task.cancel()
    await asyncio.gather(*attacks, return_exceptions=True)
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
        "memory_mb": before_mb,
        "most_memory_mb": _most[server.pid],
        "end_s": time.perf_counter() - ended,
        "exit_code": exit_code,
    }


_most: dict[int, float] = {}  # memory by process, kept when the task that looks at it is cancelled


async def _most_memory(server: ServerProcess) -> None:
    _most[server.pid] = 0.0
    while True:
        _most[server.pid] = max(_most[server.pid], await asyncio.to_thread(server.tree_mb))
        await asyncio.sleep(_LOOK_S)


async def _send_slow(server: ServerProcess, slow: bytes, number: int, replies: list[Reply]) -> None:
    picture = slow_files.changed(slow, number)
    body = Question(name="slow", picture=picture, prompt=CAPTION).body(stream=False)
    replies.append(await ask_once(server.host, server.port, body, timeout_s=_ANSWER_LIMIT_S))


def _figures(sample: Sample) -> dict[str, Any]:
    times = np.array(sample.total_s) if sample.total_s else np.array([np.inf])
    return {
        "requests_per_s": sample.num_answered / sample.seconds,
        "p50_ms": float(np.percentile(times, 50)) * 1e3,
        "p99_ms": float(np.percentile(times, 99)) * 1e3,
        "num_failed": sum(sample.others.values()),
        "others": sample.others,
        "num_wrong": sample.num_wrong,
    }
