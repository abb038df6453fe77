"""Measures `llama-adapter serve` under load, and writes its part of docs/service.json and docs/service.md.

Usage: python -m scripts.bench_service [--seconds N] [--rounds N] [--clients N ...] [--out FOLDER] [--quick]

Servers are processes on loopback; the clients are in this one, beside a captioner that says what is right. `--quick`
only shows that it runs, and writes nothing without `--out`.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.spec import DEFAULT_BATCH_SIZE
from llama_adapter.app.measuring.circumstances import circumstances, load_average
from llama_adapter.app.online.types import ServiceLimits
from scripts.service_bench.load import Sample, run_load, summary, warm_up
from scripts.service_bench.page import as_markdown
from scripts.service_bench.process import ServerProcess
from scripts.service_bench.promises import check_equality, end_under_load, overload, own_answers, sampled
from scripts.service_bench.questions import CAPTION, Question, Workload, all_questions, captions

DOCS = Path(__file__).resolve().parents[1] / "docs"
PACKAGES = ("fastapi", "starlette", "uvicorn", "h11")

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is measured."""

    clients: tuple[int, ...] = (1, 8, 32)
    seconds: float = 10.0  # of each load, all rounds together
    rounds: int = 4
    num_questions: int | None = None  # compared with the captioner's answers; None: all
    times_too_many: int = 10
    end_after_s: float = 2.0


QUICK = Settings(clients=(1, 4), seconds=0.5, rounds=1, num_questions=6, times_too_many=2, end_after_s=0.3)


def measure(settings: Settings, *, tell: Tell = lambda line: None) -> dict[str, Any]:
    """Everything, as JSON values; `tell` gets a line for each thing that was measured."""
    load_before, started = load_average(), time.perf_counter()
    questions = captions()
    with Captioner.load() as captioner:
        expected = [text for text, _, _ in own_answers(captioner, questions)]
        # A server for each part: what one part leaves behind must not show in the next.
        with ServerProcess() as server:
            rows, alone = _loads(server, captioner, questions, settings=settings, expected=expected, tell=tell)
        with ServerProcess() as server:
            equality = _equality(server, captioner, settings=settings, tell=tell)
    with ServerProcess() as server:
        crowded = _overload(server, questions, settings=settings, expected=expected, tell=tell)
    with ServerProcess() as server:
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
        "circumstances": here(load_before=load_before),
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
    """The loads in turn, and the captioner by itself between them."""
    workloads = {name: Workload(questions, is_new=name == "new") for name in ("new", "known")}
    for workload in workloads.values():
        asyncio.run(warm_up(server, workload, number=len(questions)))
    seconds = settings.seconds / settings.rounds
    samples: dict[tuple[str, int], list[Sample]] = {}
    alone: list[float] = []
    for _ in range(settings.rounds):
        for clients in settings.clients:
            for name, workload in workloads.items():
                sample = asyncio.run(run_load(server, workload, clients=clients, seconds=seconds, expected=expected))
                samples.setdefault((name, clients), []).append(sample)
        alone.append(_own_rate(captioner, questions, seconds=seconds))
    order = sorted(samples, key=lambda key: (list(workloads).index(key[0]), key[1]))
    rows = [{"pictures": name} | summary(samples[name, clients]) for name, clients in order]
    for row in rows:
        tell(f"{row['pictures']}, {row['clients']} clients: {row['requests_per_s']:.1f} requests a second")
    return rows, {"pictures_per_s": float(np.median(alone)), "rounds": alone}


def _own_rate(captioner: Captioner, questions: Sequence[Question], *, seconds: float) -> float:
    """Pictures a second of calls with all pictures, without a server."""
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
    """All requests come from one address, so that one client's share of the queue is all there is."""
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


def here(*, load_before: list[float] | None) -> dict[str, Any]:
    """The circumstances, with the versions of the server's packages."""
    about = circumstances(load_before=load_before)
    about["versions"] |= {name: metadata.version(name) for name in PACKAGES}
    return about | {"omp_num_threads": os.environ.get("OMP_NUM_THREADS", "unset")}


def write(part: str, content: Mapping[str, Any], folder: Path) -> None:
    """Replace one part of service.json, and write service.md from all parts."""
    file = folder / "service.json"
    whole = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    whole[part] = content
    file.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    (folder / "service.md").write_text(as_markdown(whole), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and fast: does it run?")
    parser.add_argument("--seconds", type=float, help=f"of each load (default: {Settings().seconds:g})")
    parser.add_argument("--rounds", type=int, help=f"these seconds are divided into (default: {Settings().rounds})")
    parser.add_argument("--clients", type=int, nargs="+", help="at once (default: 1 8 32)")
    parser.add_argument("--out", type=Path, help="folder of service.json and service.md (default: docs)")
    options = parser.parse_args(arguments)
    given = {name: getattr(options, name) for name in ("seconds", "rounds", "clients")}
    if any(
        value is not None and min([value] if not isinstance(value, list) else value) <= 0 for value in given.values()
    ):
        parser.error("--seconds, --rounds and --clients are above 0")
    if given["clients"] is not None:
        given["clients"] = tuple(given["clients"])
    settings = dataclasses.replace(
        QUICK if options.quick else Settings(), **{name: value for name, value in given.items() if value is not None}
    )
    content = measure(settings, tell=lambda line: print(line, file=sys.stderr, flush=True))
    folder = options.out or (None if options.quick else DOCS)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write("load", content, folder)


if __name__ == "__main__":
    main()
