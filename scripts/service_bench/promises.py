"""Behaviour of a service under load.

Equal answers, refusals when full, no lost requests at shutdown, and slow pictures among good requests.
"""

import asyncio
import dataclasses
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from llama_adapter.app.captioning.captioner import Captioner
from scripts.service_bench import bad_files
from scripts.service_bench.client import Connection, Reply, ask_once
from scripts.service_bench.load import TIMEOUT_S, Sample, keep_asking, percentiles_ms, run_load, shown_outcome
from scripts.service_bench.process import ServerProcess
from scripts.service_bench.questions import CAPTION, Question, Workload

_LOOK_S = 0.2
_END_LIMIT_S = 120.0  # after this time the server is killed
_ANSWER_LIMIT_S = 300.0


def sampled(questions: Sequence[Question]) -> list[Question]:
    """The same questions with sampling, each with a different seed."""
    return [
        dataclasses.replace(question, temperature=1.0, top_p=0.95, seed=1000 + index)
        for index, question in enumerate(questions)
    ]


def own_answers(captioner: Captioner, questions: Sequence[Question]) -> list[tuple[str, str, int]]:
    """Text, finish reason and number of tokens for each question, computed by the captioner directly, one at a time."""
    answers: list[tuple[str, str, int]] = []
    for question in questions:
        (answer,) = captioner.generate(
            [question.picture],
            question.prompt,
            temperature=question.temperature,
            top_p=question.top_p,
            seed=question.seed,
        )
        answers.append((answer.text, answer.finish, len(answer.token_ids)))
    return answers


async def check_equality(
    server: ServerProcess, questions: Sequence[Question], expected: Sequence[tuple[str, str, int]], *, clients: int
) -> dict[str, Any]:
    """Ask all questions over `clients` connections at once, every second one as a stream, and compare the answers."""
    waiting = list(enumerate(questions))
    different = 0

    async def ask_all() -> None:
        nonlocal different
        connection = await Connection.open(server.host, server.port)
        while waiting:
            index, question = waiting.pop()
            reply = await connection.ask(question.body(stream=index % 2 == 0), timeout_s=TIMEOUT_S)
            different += (reply.text, reply.finish, reply.num_tokens) != expected[index]
        await connection.close()

    await asyncio.gather(*(ask_all() for _ in range(clients)))
    return {"requests": len(questions), "different": different, "clients": clients}


async def overload(server: ServerProcess, workload: Workload, *, requests: int) -> dict[str, Any]:
    """Open a connection for each of `requests`, then send all requests at the same moment."""
    connections = [await Connection.open(server.host, server.port) for _ in range(requests)]
    bodies = [next(workload) for _ in connections]
    started = time.perf_counter()
    replies = await asyncio.gather(
        *(connection.ask(body, timeout_s=TIMEOUT_S) for connection, (_, body) in zip(connections, bodies, strict=True))
    )
    seconds = time.perf_counter() - started
    await asyncio.gather(*(connection.close() for connection in connections))
    outcomes = Counter(shown_outcome(reply) for reply in replies)
    answered = [(index, reply) for (index, _), reply in zip(bodies, replies, strict=True) if reply.status == 200]
    turned_away = [reply for reply in replies if reply.status in (429, 503)]
    return {
        "requests": requests,
        "outcomes": dict(outcomes),
        "num_wrong": sum(reply.text != workload.expected[index] for index, reply in answered),
        "num_without_retry_after": sum(not _says_when(reply) for reply in turned_away),
        "retry_after_s": sorted({int(reply.headers["retry-after"]) for reply in turned_away if _says_when(reply)}),
        "answered_ms": percentiles_ms([reply.total_s for _, reply in answered]),
        "refused_ms": percentiles_ms([reply.total_s for reply in turned_away]),
        "seconds": seconds,
    }


def _says_when(reply: Reply) -> bool:
    value = reply.headers.get("retry-after", "")
    return value.isdecimal() and int(value) >= 1


async def end_under_load(server: ServerProcess, workload: Workload, *, clients: int, after_s: float) -> dict[str, Any]:
    """Send SIGTERM while `clients` send requests continuously; stop when no client gets a connection."""
    replies: list[tuple[int, Reply]] = []
    clients_at_work = asyncio.gather(*(keep_asking(server, workload, replies) for _ in range(clients)))
    await asyncio.sleep(after_s)
    ended_at = time.perf_counter()
    server.terminate()
    exit_code = await asyncio.to_thread(server.wait, timeout_s=TIMEOUT_S)
    drain_s = time.perf_counter() - ended_at
    await clients_at_work
    return at_the_end(replies, ended_at=ended_at, expected=workload.expected) | {
        "clients": clients,
        "exit_code": exit_code,
        "drain_s": drain_s,
    }


def at_the_end(replies: Sequence[tuple[int, Reply]], *, ended_at: float, expected: Sequence[str]) -> dict[str, Any]:
    """Outcomes of requests in progress at the end and of requests sent after it, and the number of lost requests."""
    after = [reply for _, reply in replies if reply.started >= ended_at]
    across = [reply for _, reply in replies if reply.started < ended_at < reply.started + reply.total_s]
    answered = [(index, reply) for index, reply in replies if reply.outcome == "answered"]
    return {
        "across": dict(Counter(shown_outcome(reply) for reply in across)),
        "after": dict(Counter(shown_outcome(reply) for reply in after)),
        "num_wrong": sum(reply.text != expected[index] for index, reply in answered),
        # Complete answers, refusals, and connections that were never served do not count as lost.
        "num_lost": sum(reply.outcome in ("broken", "hung") for _, reply in replies)
        + sum(reply.outcome == "not_accepted" for reply in across),
    }


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
    """Run `good` clients alone for `calm_s` seconds, then for `attack_s` seconds with `attackers` that send `slow`.

    Gives the latency of the good ones, memory, and the time that the server takes to end.
    """
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
    picture = bad_files.changed(slow, number)
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
