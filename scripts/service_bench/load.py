"""A load from several clients, each with one request at a time: outcomes and times."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scripts.common import process_cpu_s
from scripts.service_bench.client import Connection, Reply, ask_once
from scripts.service_bench.process import ServerProcess
from scripts.service_bench.questions import Workload

TIMEOUT_S = 60.0  # a request that takes longer counts as hung


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One measurement of one load."""

    clients: int
    seconds: float
    num_answered: int  # within the seconds
    num_wrong: int  # complete, but different from the captioner's answer
    first_token_s: list[float]
    total_s: list[float]
    others: dict[str, int]  # other outcomes, such as `refused 429`
    client_cpu_share: float  # of one core
    server_cpu_share: float


async def run_load(server: ServerProcess, workload: Workload, *, clients: int, seconds: float) -> Sample:
    """Measure a load of `clients` that all ask for `seconds`."""
    replies: list[tuple[int, Reply]] = []
    server_cpu, client_cpu = process_cpu_s(server.pid), time.process_time()
    started = time.perf_counter()
    deadline = started + seconds
    await asyncio.gather(*(keep_asking(server, workload, replies, deadline=deadline) for _ in range(clients)))
    wall = time.perf_counter() - started
    answered = [(index, reply) for index, reply in replies if reply.outcome == "answered"]
    others = Counter(shown_outcome(reply) for _, reply in replies if reply.outcome != "answered")
    return Sample(
        clients=clients,
        seconds=seconds,
        num_answered=sum(reply.started + reply.total_s <= deadline for _, reply in answered),
        num_wrong=sum(reply.text != workload.expected[index] for index, reply in answered),
        first_token_s=[reply.first_token_s for _, reply in answered],
        total_s=[reply.total_s for _, reply in answered],
        others=dict(others),
        client_cpu_share=(time.process_time() - client_cpu) / wall,
        server_cpu_share=(process_cpu_s(server.pid) - server_cpu) / wall,
    )


async def keep_asking(
    server: ServerProcess, workload: Workload, replies: list[tuple[int, Reply]], *, deadline: float
) -> None:
    """One client's requests over one connection, until `deadline` (by `time.perf_counter()`) or a refused connection.

    A reply is appended with the index of its question.
    """
    connection: Connection | None = None
    while (started := time.perf_counter()) < deadline:
        index, body = next(workload)
        if connection is None or not connection.is_open:
            try:
                connection = await Connection.open(server.host, server.port)
            except OSError:
                replies.append((index, Reply(outcome="not_accepted", started=started)))
                return
        replies.append((index, reply := await connection.ask(body, timeout_s=TIMEOUT_S)))
        if reply.status == 503:
            await asyncio.sleep(0.05)  # back off like a client, but for a shorter time
    if connection is not None:
        await connection.close()


async def warm_up(server: ServerProcess, workload: Workload, *, number: int) -> None:
    """Ask `number` questions, one after another. Raises RuntimeError if one gets no answer."""
    for _ in range(number):
        _, body = next(workload)
        reply = await ask_once(server.host, server.port, body, timeout_s=TIMEOUT_S)
        if reply.outcome != "answered":
            raise RuntimeError(f"A request before the measurement was not answered: {shown_outcome(reply)}")


def shown_outcome(reply: Reply) -> str:
    """The outcome as text; refusals include status and code."""
    return f"refused {reply.status} {reply.code}" if reply.outcome == "refused" else reply.outcome


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """JSON values of one load: rates by round, and percentiles over all requests."""
    others: Counter[str] = Counter()
    for sample in samples:
        others.update(sample.others)
    rates = [sample.num_answered / sample.seconds for sample in samples]
    return {
        "clients": samples[0].clients,
        "requests": sum(len(sample.total_s) for sample in samples),
        "num_wrong": sum(sample.num_wrong for sample in samples),
        "others": dict(others),
        "requests_per_s": float(np.median(rates)),
        "rounds": rates,
        "first_token_ms": _percentiles_ms([second for sample in samples for second in sample.first_token_s]),
        "total_ms": _percentiles_ms([second for sample in samples for second in sample.total_s]),
        "client_cpu_share": float(np.mean([sample.client_cpu_share for sample in samples])),
        "server_cpu_share": float(np.mean([sample.server_cpu_share for sample in samples])),
    }


def _percentiles_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """p50 and p95 in milliseconds; None for no values."""
    if not seconds:
        return None
    return {f"p{share}": float(np.percentile(seconds, share)) * 1e3 for share in (50, 95)}
