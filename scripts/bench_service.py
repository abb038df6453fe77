"""Measures `llama-adapter serve` under load, and writes its part of docs/service.json and docs/service.md.

Usage: python -m scripts.bench_service [--seconds N] [--rounds N] [--clients N ...] [--out FOLDER] [--quick]

Servers are processes on loopback. The clients are in this process, beside a captioner that gives the right answers.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.measuring.report import load_average
from llama_adapter.app.models.spec import DEFAULT_BATCH_SIZE
from llama_adapter.app.online.types import ServiceLimits
from scripts.common import Tell, in_turn, machine, run_bench, silent
from scripts.service_bench.load import Sample, run_load, summary, warm_up
from scripts.service_bench.process import ServerProcess
from scripts.service_bench.promises import check_equality, end_under_load, overload, own_answers, sampled
from scripts.service_bench.questions import CAPTION, Question, Workload, all_questions, captions

PACKAGES = ("fastapi", "starlette", "uvicorn", "h11")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is measured."""

    clients: tuple[int, ...] = (1, 8, 32)
    seconds: float = 10.0  # of each load, all rounds together
    rounds: int = 4
    num_questions: int | None = None  # compared with the captioner's answers; None means all
    times_too_many: int = 10
    end_after_s: float = 2.0


QUICK = Settings(clients=(1, 4), seconds=0.5, rounds=1, num_questions=6, times_too_many=2, end_after_s=0.3)


def measure(
    settings: Settings,
    *,
    tell: Tell = silent,
    serve: Callable[[], AbstractContextManager[ServerProcess]] = ServerProcess,
) -> dict[str, Any]:
    """All figures as JSON values; `tell` gets a line for each measurement, `serve` starts a server."""
    load_before, started = load_average(), time.perf_counter()
    questions = captions()
    with Captioner.load() as captioner:
        expected = [text for text, _, _ in own_answers(captioner, questions)]
        # Each part gets a fresh server, so that it is not affected by the one before.
        with serve() as server:
            rows, alone = _loads(server, captioner, questions, settings=settings, expected=expected, tell=tell)
        with serve() as server:
            equality = _equality(server, captioner, settings=settings, tell=tell)
    with serve() as server:
        crowded = _overload(server, questions, settings=settings, expected=expected, tell=tell)
    with serve() as server:
        end = _end(server, questions, settings=settings, expected=expected, tell=tell)
    return {
        "rows": rows,
        "in_process": alone,
        "num_pictures": len(questions),
        "batch_size": DEFAULT_BATCH_SIZE,
        "rounds": settings.rounds,
        "seconds": settings.seconds / settings.rounds,
        "equality": equality,
        "overload": crowded,
        "end": end,
        "elapsed_s": time.perf_counter() - started,
        "circumstances": machine(*PACKAGES, load_before=load_before),
    }


def _loads(
    server: ServerProcess,
    captioner: Captioner,
    questions: list[Question],
    *,
    settings: Settings,
    expected: Sequence[str],
    tell: Tell,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of all loads, measured in turn, and the rate of the captioner alone."""
    workloads = {name: Workload(questions, is_new=name == "new") for name in ("new", "known")}
    for workload in workloads.values():
        asyncio.run(warm_up(server, workload, number=len(questions)))
    seconds = settings.seconds / settings.rounds
    ways = list(itertools.product(workloads, settings.clients))

    def run(way: tuple[str, int]) -> Sample | float:
        name, clients = way
        if not clients:
            return _own_rate(captioner, questions, seconds=seconds)
        load = run_load(server, workloads[name], clients=clients, seconds=seconds, expected=expected)
        return asyncio.run(load)

    alone = ("in process", 0)
    found: dict[tuple[str, int], list[Any]] = in_turn((*ways, alone), run, rounds=settings.rounds)
    rows = [{"pictures": way[0]} | summary(found[way]) for way in ways]
    for row in rows:
        tell(f"{row['pictures']}, {row['clients']} clients: {row['requests_per_s']:.1f} requests/s")
    return rows, {"pictures_per_s": statistics.median(found[alone]), "rounds": found[alone]}


def _own_rate(captioner: Captioner, questions: Sequence[Question], *, seconds: float) -> float:
    """Pictures per second without a server, all pictures per call."""
    pictures = [question.picture for question in questions]
    number, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds or not number:
        number += len(captioner.generate(pictures, CAPTION))
    return number / elapsed


def _equality(server: ServerProcess, captioner: Captioner, *, settings: Settings, tell: Tell) -> list[dict[str, Any]]:
    questions = all_questions()[: settings.num_questions]
    rows = []
    for how, asked in (("greedy", questions), ("temperature 1, top_p 0.95, a seed each", sampled(questions))):
        expected = own_answers(captioner, asked)
        row = asyncio.run(check_equality(server, asked, expected, clients=max(settings.clients)))
        rows.append({"how": how} | row)
        tell(f"{how}: {row['different']} of {row['requests']} answers differ")
    return rows


def _overload(
    server: ServerProcess, questions: list[Question], *, settings: Settings, expected: Sequence[str], tell: Tell
) -> dict[str, Any]:
    """More requests than the server holds. All come from one address and share one client's part of the queue."""
    limits = ServiceLimits()
    holds = DEFAULT_BATCH_SIZE + min(limits.max_waiting, limits.max_waiting_per_client)
    workload = Workload(questions, is_new=True)
    asyncio.run(warm_up(server, workload, number=5))
    row = asyncio.run(overload(server, workload, requests=settings.times_too_many * holds, expected=expected))
    tell(f"overload: {row['outcomes']}")
    return {"holds": holds} | row


def _end(
    server: ServerProcess, questions: list[Question], *, settings: Settings, expected: Sequence[str], tell: Tell
) -> dict[str, Any]:
    workload = Workload(questions, is_new=True)
    asyncio.run(warm_up(server, workload, number=5))
    clients = max(settings.clients)
    row = asyncio.run(
        end_under_load(server, workload, clients=clients, after_s=settings.end_after_s, expected=expected)
    )
    tell(f"SIGTERM: {row['num_lost']} lost, exit code {row['exit_code']}")
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    flags = {"seconds": "of each load, all rounds together", "rounds": "that the seconds are divided into"}
    flags |= {"clients": "numbers of clients at once"}
    run_bench(
        __doc__, arguments, measure=measure, page="service", part="load", full=Settings(), quick=QUICK, flags=flags
    )


if __name__ == "__main__":
    main()
