"""Measures `llama-adapter serve`, and writes docs/service.json and docs/service.md.

Usage: python -m scripts.bench_service [--seconds N] [--rounds N] [--clients N ...] [--out FOLDER] [--quick]

The server is a process on loopback. The clients run in this process, next to a captioner that computes the expected
answers.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.spec import DEFAULT_BATCH_SIZE
from scripts.bench import run_bench
from scripts.common import in_turn, tell
from scripts.service_bench.load import Sample, run_load, summary, warm_up
from scripts.service_bench.process import ServerProcess
from scripts.service_bench.questions import CAPTION, Question, Workload, captions


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is measured."""

    clients: Annotated[tuple[int, ...], "numbers of clients at once"] = (1, 8, 32)
    seconds: Annotated[float, "seconds of each load, all rounds together"] = 10.0
    rounds: Annotated[int, "rounds that the seconds are divided into"] = 4
    num_pictures: int | None = None  # None means all samples


QUICK = Settings(clients=(1, 4), seconds=0.5, rounds=1, num_pictures=8)


def measure_load(settings: Settings) -> dict[str, Any]:
    """Rates and times of new and of known pictures, and the rate of the captioner alone."""
    questions = captions()[: settings.num_pictures]
    with Captioner.load() as captioner, ServerProcess() as server:
        expected = [answer.text for answer in captioner.generate(_pictures(questions), CAPTION, temperature=0.0)]
        workloads = {name: Workload(questions, is_new=name == "new", expected=expected) for name in ("new", "known")}
        rows, alone = _loads(server, captioner, workloads, questions, settings=settings)
    return {
        "rows": rows,
        "in_process": alone,
        "num_pictures": len(questions),
        "batch_size": DEFAULT_BATCH_SIZE,
        "rounds": settings.rounds,
        "seconds": settings.seconds / settings.rounds,
    }


def _loads(
    server: ServerProcess,
    captioner: Captioner,
    workloads: Mapping[str, Workload],
    questions: Sequence[Question],
    *,
    settings: Settings,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of all loads, measured in turn, and the rate of the captioner alone."""
    for workload in workloads.values():
        asyncio.run(warm_up(server, workload, number=workload.num_questions))
    seconds = settings.seconds / settings.rounds
    ways = list(itertools.product(workloads, settings.clients))

    def run(way: tuple[str, int]) -> Sample | float:
        name, clients = way
        if not clients:
            return _own_rate(captioner, questions, seconds=seconds)
        return asyncio.run(run_load(server, workloads[name], clients=clients, seconds=seconds))

    alone = ("in process", 0)
    found: dict[tuple[str, int], list[Any]] = in_turn((*ways, alone), run, rounds=settings.rounds)
    rows = [{"pictures": way[0]} | summary(found[way]) for way in ways]
    for row in rows:
        tell(f"{row['pictures']}, {row['clients']} clients: {row['requests_per_s']:.1f} requests/s")
    return rows, {"pictures_per_s": statistics.median(found[alone]), "rounds": found[alone]}


def _own_rate(captioner: Captioner, questions: Sequence[Question], *, seconds: float) -> float:
    """Pictures per second without a server, with all pictures in one call."""
    pictures = _pictures(questions)
    number, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds or not number:
        number += len(captioner.generate(pictures, CAPTION))
    return number / elapsed


def _pictures(questions: Sequence[Question]) -> list[bytes]:
    return [question.picture for question in questions]


def main(arguments: Sequence[str] | None = None) -> None:
    run_bench(
        __doc__,
        arguments,
        measure=measure_load,
        page="service",
        packages=("fastapi", "starlette", "uvicorn", "h11"),
        full=Settings(),
        quick=QUICK,
    )


if __name__ == "__main__":
    main()
