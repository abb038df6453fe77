"""Measures `llama-adapter serve`, and writes docs/service.json and docs/service.md.

Usage: python -m scripts.bench_service [--part load|attack|refusals|replicas ...] [--seconds N] [--rounds N]
                                       [--clients N ...] [--out FOLDER] [--quick]

Parts that are not measured keep their figures. Servers are processes on loopback. The clients run in this process, next
to a captioner that computes the expected answers. The exit code is 1 if a good request sent next to slow pictures got
no answer or a wrong one, or if a refused request got an unexpected status or code.
"""

import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.spec import DEFAULT_BATCH_SIZE
from llama_adapter.app.serving.online.types import ServiceLimits
from scripts.bench import run_bench
from scripts.common import in_turn, tell
from scripts.service_bench.attack import attack
from scripts.service_bench.load import Sample, run_load, summary, warm_up
from scripts.service_bench.process import ServerProcess
from scripts.service_bench.promises import check_equality, end_under_load, overload, own_answers, sampled
from scripts.service_bench.questions import CAPTION, Question, Workload, all_questions, captions
from scripts.service_bench.refusals import measure_refusals
from scripts.service_bench.replicas import measure_kill, measure_rates
from scripts.service_bench.slow_files import KINDS, progressive_jpeg


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is measured."""

    clients: tuple[int, ...] = (1, 8, 32)
    seconds: float = 10.0  # for each load, all rounds together
    rounds: int = 4
    num_pictures: int | None = None  # None means all samples
    num_questions: int | None = None  # compared with the captioner's answers; None means all
    times_too_many: int = 10
    end_after_s: float = 2.0
    kinds: tuple[tuple[str, Callable[[], bytes]], ...] = KINDS  # of slow pictures
    good: int = 32  # clients with good requests, next to 8 with slow pictures
    calm_s: float = 5.0
    attack_s: float = 20.0
    replicas: tuple[int, ...] = (0, 1, 2)  # 0: the model is in the server's process
    killed_s: float = 25.0  # duration of the load during which a replica is killed


QUICK = Settings(
    clients=(1, 4),
    seconds=0.5,
    rounds=1,
    num_pictures=8,
    num_questions=6,
    times_too_many=2,
    end_after_s=0.3,
    kinds=(("small", partial(progressive_jpeg, side=256, num_scans=50)),),
    good=8,
    calm_s=0.3,
    attack_s=1.0,
    replicas=(2,),
    killed_s=1.0,
)


def measure_load(settings: Settings) -> dict[str, Any]:
    """Rates and times, equality of answers, refusals when the server is full, and shutdown under load."""
    questions = captions()[: settings.num_pictures]
    with Captioner.load() as captioner:
        expected = [text for text, _, _ in own_answers(captioner, questions)]
        # Each part gets a fresh server, so that earlier parts do not affect it.
        with ServerProcess() as server:
            rows, alone = _loads(server, captioner, questions, settings=settings, expected=expected)
        with ServerProcess() as server:
            equality = _equality(server, captioner, settings=settings)
    with ServerProcess() as server:
        crowded = _overload(server, questions, settings=settings, expected=expected)
    with ServerProcess() as server:
        end = _end(server, questions, settings=settings, expected=expected)
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
    }


def _loads(
    server: ServerProcess,
    captioner: Captioner,
    questions: list[Question],
    *,
    settings: Settings,
    expected: Sequence[str],
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
    """Pictures per second without a server, with all pictures in one call."""
    pictures = [question.picture for question in questions]
    number, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds or not number:
        number += len(captioner.generate(pictures, CAPTION))
    return number / elapsed


def _equality(server: ServerProcess, captioner: Captioner, *, settings: Settings) -> list[dict[str, Any]]:
    questions = all_questions()[: settings.num_questions]
    rows = []
    for how, asked in (("greedy", questions), ("temperature 1, top_p 0.95, a seed each", sampled(questions))):
        expected = own_answers(captioner, asked)
        row = asyncio.run(check_equality(server, asked, expected, clients=max(settings.clients)))
        rows.append({"how": how} | row)
        tell(f"{how}: {row['different']} of {row['requests']} answers differ")
    return rows


def _overload(
    server: ServerProcess, questions: list[Question], *, settings: Settings, expected: Sequence[str]
) -> dict[str, Any]:
    """Send more requests than the server holds. All come from one address and share one client's part of the queue."""
    limits = ServiceLimits()
    holds = DEFAULT_BATCH_SIZE + min(limits.max_waiting, limits.max_waiting_per_client)
    workload = Workload(questions, is_new=True)
    asyncio.run(warm_up(server, workload, number=5))
    row = asyncio.run(overload(server, workload, requests=settings.times_too_many * holds, expected=expected))
    tell(f"overload: {row['outcomes']}")
    return {"holds": holds} | row


def _end(
    server: ServerProcess, questions: list[Question], *, settings: Settings, expected: Sequence[str]
) -> dict[str, Any]:
    workload = Workload(questions, is_new=True)
    asyncio.run(warm_up(server, workload, number=5))
    clients = max(settings.clients)
    row = asyncio.run(
        end_under_load(server, workload, clients=clients, after_s=settings.end_after_s, expected=expected)
    )
    tell(f"SIGTERM: {row['num_lost']} lost, exit code {row['exit_code']}")
    return row


def measure_attack(settings: Settings) -> dict[str, Any]:
    """Measure a fresh server for each kind of slow picture, under good requests at the same time."""
    questions = captions()[: settings.num_pictures]
    with Captioner.load() as captioner:
        expected = [text for text, _, _ in own_answers(captioner, questions)]
    given: dict[str, Any] = {"good": settings.good, "attackers": 8}
    given |= {"calm_s": settings.calm_s, "attack_s": settings.attack_s}
    rows, largest = [], 0
    for kind, make in settings.kinds:
        slow, workload = make(), Workload(questions, is_new=True)
        largest = max(largest, len(slow))
        with ServerProcess() as server:
            asyncio.run(warm_up(server, workload, number=len(questions)))
            row = asyncio.run(attack(server, workload, slow=slow, expected=expected, **given))
        rows.append({"kind": kind} | row)
        tell(f"{kind}: {row}")
    return {"rows": rows, **given, "largest_mb": largest / 1e6}


def measure_replicas(settings: Settings) -> dict[str, Any]:
    """Rates through replicas, and the effect of killing one."""
    questions = captions()[: settings.num_pictures]
    with Captioner.load() as captioner:
        expected = [text for text, _, _ in own_answers(captioner, questions)]
    seconds = settings.seconds / settings.rounds
    rows = measure_rates(
        questions,
        numbers=settings.replicas,
        clients=settings.clients,
        rounds=settings.rounds,
        seconds=seconds,
        expected=expected,
    )
    killed = measure_kill(
        questions,
        clients=max(settings.clients),
        seconds=settings.killed_s,
        after_s=settings.killed_s / 5,
        expected=expected,
    )
    tell(f"killed replica: {killed}")
    return {"rows": rows, "killed": killed, "rounds": settings.rounds, "seconds": seconds}


def main(arguments: Sequence[str] | None = None) -> int:
    flags = {
        "seconds": "seconds of each load, all rounds together",
        "rounds": "rounds that the seconds are divided into",
    }
    found = run_bench(
        __doc__,
        arguments,
        measure={
            "load": measure_load,
            "attack": measure_attack,
            "refusals": measure_refusals,
            "replicas": measure_replicas,
        },
        page="service",
        packages=("fastapi", "starlette", "uvicorn", "h11", "ray"),
        full=Settings(),
        quick=QUICK,
        flags=flags | {"clients": "numbers of clients at once"},
    )
    attacks = [row["under_attack"] for row in found.get("attack", {"rows": []})["rows"]]
    is_right = [row["is_right"] for row in found.get("refusals", {"rows": []})["rows"]]
    return int(any(figures["num_failed"] or figures["num_wrong"] for figures in attacks) or not all(is_right))


if __name__ == "__main__":
    sys.exit(main())
