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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.spec import DEFAULT_BATCH_SIZE
from llama_adapter.app.serving.online.types import ServiceLimits
from scripts.bench import run_bench
from scripts.common import in_turn, tell
from scripts.service_bench.bad_files import SLOW_KINDS, progressive_jpeg
from scripts.service_bench.load import Sample, run_load, summary, warm_up
from scripts.service_bench.process import ServerProcess
from scripts.service_bench.promises import attack, check_equality, end_under_load, overload, own_answers, sampled
from scripts.service_bench.questions import CAPTION, Question, Workload, all_questions, captions
from scripts.service_bench.refused import measure_refusals
from scripts.service_bench.replicas import measure_kill, measure_rates


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is measured."""

    clients: Annotated[tuple[int, ...], "numbers of clients at once"] = (1, 8, 32)
    seconds: Annotated[float, "seconds of each load, all rounds together"] = 10.0
    rounds: Annotated[int, "rounds that the seconds are divided into"] = 4
    num_pictures: int | None = None  # None means all samples
    num_questions: int | None = None  # compared with the captioner's answers; None means all
    times_too_many: int = 10
    end_after_s: float = 2.0
    kinds: tuple[tuple[str, Callable[[], bytes]], ...] = SLOW_KINDS  # of slow pictures
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
    with Captioner.load() as captioner:
        workloads = _workloads(captioner, settings)
        # Each part gets a fresh server, so that earlier parts do not affect it.
        with ServerProcess() as server:
            rows, alone = _loads(server, captioner, workloads, settings=settings)
        with ServerProcess() as server:
            equality = _equality(server, captioner, settings=settings)
    with ServerProcess() as server:
        crowded = _overload(server, workloads["new"], settings=settings)
    with ServerProcess() as server:
        end = _end(server, workloads["new"], settings=settings)
    return {
        "rows": rows,
        "in_process": alone,
        "num_pictures": workloads["new"].num_questions,
        "batch_size": DEFAULT_BATCH_SIZE,
        "rounds": settings.rounds,
        "seconds": settings.seconds / settings.rounds,
        "equality": equality,
        "overload": crowded,
        "end": end,
    }


def _workloads(captioner: Captioner, settings: Settings) -> dict[str, Workload]:
    """Caption questions about the samples, as new and as known pictures, with the captioner's answers."""
    questions = captions()[: settings.num_pictures]
    expected = [text for text, _, _ in own_answers(captioner, questions)]
    return {name: Workload(questions, is_new=name == "new", expected=expected) for name in ("new", "known")}


def _loads(
    server: ServerProcess, captioner: Captioner, workloads: Mapping[str, Workload], *, settings: Settings
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of all loads, measured in turn, and the rate of the captioner alone."""
    for workload in workloads.values():
        asyncio.run(warm_up(server, workload, number=workload.num_questions))
    seconds = settings.seconds / settings.rounds
    ways = list(itertools.product(workloads, settings.clients))

    def run(way: tuple[str, int]) -> Sample | float:
        name, clients = way
        if not clients:
            return _own_rate(captioner, captions()[: settings.num_pictures], seconds=seconds)
        return asyncio.run(run_load(server, workloads[name], clients=clients, seconds=seconds))

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


def _overload(server: ServerProcess, workload: Workload, *, settings: Settings) -> dict[str, Any]:
    """Send more requests than the server holds. All come from one address and share one client's part of the queue."""
    limits = ServiceLimits()
    holds = DEFAULT_BATCH_SIZE + min(limits.max_waiting, limits.max_waiting_per_client)
    asyncio.run(warm_up(server, workload, number=5))
    row = asyncio.run(overload(server, workload, requests=settings.times_too_many * holds))
    tell(f"overload: {row['outcomes']}")
    return {"holds": holds} | row


def _end(server: ServerProcess, workload: Workload, *, settings: Settings) -> dict[str, Any]:
    asyncio.run(warm_up(server, workload, number=5))
    ending = end_under_load(server, workload, clients=max(settings.clients), after_s=settings.end_after_s)
    row = asyncio.run(ending)
    tell(f"SIGTERM: {row['num_lost']} lost, exit code {row['exit_code']}")
    return row


def measure_attack(settings: Settings) -> dict[str, Any]:
    """Measure a fresh server for each kind of slow picture, under good requests at the same time."""
    with Captioner.load() as captioner:
        workload = _workloads(captioner, settings)["new"]
    given: dict[str, Any] = {"good": settings.good, "attackers": 8}
    given |= {"calm_s": settings.calm_s, "attack_s": settings.attack_s}
    rows, largest = [], 0
    for kind, make in settings.kinds:
        slow = make()
        largest = max(largest, len(slow))
        with ServerProcess() as server:
            asyncio.run(warm_up(server, workload, number=workload.num_questions))
            row = asyncio.run(attack(server, workload, slow=slow, **given))
        rows.append({"kind": kind} | row)
        tell(f"{kind}: {row}")
    return {"rows": rows, **given, "largest_mb": largest / 1e6}


def measure_replicas(settings: Settings) -> dict[str, Any]:
    """Rates through replicas, and the effect of killing one."""
    with Captioner.load() as captioner:
        workloads = _workloads(captioner, settings)
    load: dict[str, Any] = {"rounds": settings.rounds, "seconds": settings.seconds / settings.rounds}
    rows = measure_rates(workloads, numbers=settings.replicas, clients=settings.clients, **load)
    seconds = settings.killed_s
    killed = measure_kill(workloads["new"], clients=max(settings.clients), seconds=seconds, after_s=seconds / 5)
    tell(f"killed replica: {killed}")
    return {"rows": rows, "killed": killed, **load}


def main(arguments: Sequence[str] | None = None) -> int:
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
    )
    attacks = [row["under_attack"] for row in found.get("attack", {"rows": []})["rows"]]
    is_right = [row["is_right"] for row in found.get("refusals", {"rows": []})["rows"]]
    return int(any(figures["num_failed"] or figures["num_wrong"] for figures in attacks) or not all(is_right))


if __name__ == "__main__":
    sys.exit(main())
