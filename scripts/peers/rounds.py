"""The rounds of a run: each round measures every engine once, each in its own process, one at a time."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from llama_adapter.runtime.schemes import finer
from scripts.common import ROOT, Tell
from scripts.peers.processes import Children, Runner, run_child
from scripts.peers.results import Key, Missing, Results, Row
from scripts.peers.sizes import (
    ENCODERS,
    JOB_ENCODERS,
    JOB_ENDS,
    SMALL_JOB,
    place_of,
)
from scripts.peers.table import (
    DEVICES,
    MACHINES,
    TUNED,
    Device,
    Engine,
    Reply,
    Rung,
    Section,
    Task,
    chosen_engines,
    engine_names,
)

_TIMEOUT_S: dict[Device, float] = {"cpu": 600.0, "cuda": 100.0}  # of one engine
_LEAST_S = 15.0  # with less time left, no engine is started


# Without slots, so that defaults can be read as class attributes.
@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run measures, as plain values."""

    sections: Annotated[tuple[Section, ...], "sections to measure"] = ("decode", "job", "vision")
    sizes: Annotated[tuple[str, ...], "sizes of models"] = ("1B", "160M", "ViT-L/14")
    engines: Annotated[tuple[str, ...], "engines to measure"] = tuple(
        name for name in engine_names() if name not in TUNED
    )
    batch_sizes: Annotated[tuple[int, ...], "batch sizes of decode steps and of picture encoders"] = (1, 5, 16)
    prefill_batch_sizes: Annotated[tuple[int, ...], "batch sizes of prefills"] = (1, 5)
    job_sizes: Annotated[tuple[int, ...], "numbers of pictures of jobs"] = (len(JOB_ENDS),)
    rounds: Annotated[int, "each round starts every engine once"] = 3
    threads: Annotated[int, "threads of every engine"] = 1
    work: Annotated[str, "working folder"] = str(Path(".work/peers").absolute())
    budget: Annotated[float, "seconds for the repetitions of one figure"] = 2.5
    long: Annotated[float, "seconds; figures that take longer are measured in one round only"] = 8.0
    processor: Annotated[str, "a short name for the page, if the processor is not that of docs/peers.md"] = ""
    device: Annotated[Device, "the kind of device that computes"] = DEVICES[0]
    on: Annotated[str, "the device that computes instead, to try the code"] = ""
    limit: Annotated[float, "seconds after which no engine is started, and the running one is ended"] = math.inf

    def tasks(self) -> Iterator[Task]:
        """All tasks of one round, in order: the ceilings of the machine before each size, and jobs last.

        The ceilings are those of our engines that are measured: one of another type may take a machine long.
        """
        for size in self.sizes:
            tasks = list(self._tasks("vision" if size in ENCODERS else "decode", size))
            ceilings = dict.fromkeys(task.engine.ceiling for task in tasks if task.engine.program == "ours")
            yield replace(self._task(MACHINES[self.device], size), ceilings=tuple(ceilings))
            yield from tasks
        for size in self.sizes:
            for encoder in JOB_ENCODERS.get(size, ()):
                yield from self._tasks("job", f"{size}+{encoder}")

    def _tasks(self, section: Section, size: str) -> Iterator[Task]:
        if section in self.sections:
            for engine in chosen_engines(self.engines, section, self.device):
                if (not engine.sizes or size in engine.sizes) and (task := self._task(engine, size)).rungs:
                    yield task

    def _task(self, engine: Engine, size: str) -> Task:
        is_compiled = engine.program == "hf-compiled"
        # Every batch size is compiled, so there may not be time for all. Prefills are not compiled.
        batches = (*self.batch_sizes[::2], *self.batch_sizes[1::2]) if is_compiled else self.batch_sizes
        prefills: list[Rung] = [("prefill", batch) for batch in self.prefill_batch_sizes if not is_compiled]
        rungs: dict[Section, list[Rung]] = {
            "machine": [("ceiling", 1)],
            "decode": [*prefills, *(("decode", batch) for batch in batches)],
            "job": [("job", count) for count in self.job_sizes if (count > SMALL_JOB) == (engine.slots is not None)],
            "vision": [("vision", batch) for batch in batches],
        }
        return Task(
            engine=engine,
            size=size,
            work=self.work,
            threads=self.threads,
            rungs=tuple(rungs[engine.section]),
            num_rows=max((batch for _, batch in rungs[engine.section]), default=1),
            budget_s=self.budget,
            timeout_s=_TIMEOUT_S[self.device],
            on=self.on,
        )


@dataclass(kw_only=True, slots=True)
class Gathered:
    """Results of one run so far."""

    run: str
    circumstances: dict[str, Any] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    rows: dict[Key, Row] = field(default_factory=dict)
    too_long: set[tuple[str, str, Rung]] = field(default_factory=set)  # engine, size, figure
    missing: dict[tuple[Engine, str], Missing] = field(default_factory=dict)

    def take(self, task: Task, reply: Reply, *, long_s: float) -> None:
        engine = task.engine
        if reply.problem:
            self.missing[engine, task.size] = Missing(
                engine=engine.name,
                size=task.size,
                section=engine.section,
                threads=task.threads,
                problem=reply.problem,
                reason=_without_places(reply.reason, work=task.work),
            )
        self.circumstances = self.circumstances or reply.circumstances
        self.packages |= reply.packages
        for figure in reply.figures:
            row = Row(
                part=figure.part,
                engine=figure.engine,
                size=task.size,
                batch=figure.batch,
                threads=task.threads,
                run=self.run,
                rates=(_four_digits(figure.rate),),
                stages_s={name: _four_digits(seconds) for name, seconds in figure.stages_s.items()},
                answers=figure.answers,
                slots=figure.slots,
                error=_four_digits(figure.error),
                reads=(_four_digits(figure.read),) if figure.read else (),
            )
            if (before := self.rows.get(row.key)) is not None:
                row = replace(row, rates=(*before.rates, *row.rates), reads=(*before.reads, *row.reads))
            self.rows[row.key] = row
            if figure.spent_s > long_s:
                self.too_long.add((engine.name, task.size, (figure.part, figure.batch)))

    def next_task(self, task: Task) -> Task | None:
        """The task without figures that take too long; None if no figure is left or the engine failed."""
        if (task.engine, task.size) in self.missing:
            return None
        rungs = tuple(rung for rung in task.rungs if (task.engine.name, task.size, rung) not in self.too_long)
        return replace(task, rungs=rungs) if rungs else None

    def results(self, settings: dict[str, Any]) -> Results:
        """Rows, with the circumstances and the settings of the run."""
        runs = {self.run: {**self.circumstances, "peers": self.packages, "settings": settings}}
        return Results(runs=runs, rows=tuple(self.rows.values()), missing=tuple(self.missing.values()))


def run_rounds(plan: Plan, *, tell: Tell, keep: Callable[[Results], None], run: Runner | None = None) -> Results:
    """Make the files, then measure round by round; `keep` gets all results so far after each task.

    `run` answers a task, by default in a child process: on a CPU in its own, so that engines do not disturb each other.
    An engine that fails or is missing is skipped from then on.
    """
    if run is None and plan.device != "cpu":
        with contextlib.closing(Children()) as children:
            return run_rounds(plan, tell=tell, keep=keep, run=children)
    run = run or run_child
    gathered = Gathered(run=datetime.now(UTC).isoformat(timespec="seconds"))
    settings: dict[str, Any] = {"rounds": plan.rounds, "budget_s": plan.budget, "long_s": plan.long, "flash": "auto"}
    settings["int4_head"] = finer("int4")
    started = time.perf_counter()
    if plan.device == "cpu":  # elsewhere, they are made when they are needed, so that other engines come first
        _make_files(plan, gathered, run=run, tell=tell)
    for number in range(1, plan.rounds + 1):
        tasks = list(plan.tasks())
        for index, task in enumerate(tasks, start=1):
            asked = gathered.next_task(task)
            if asked is None:
                continue
            begun = time.perf_counter()
            left_s = plan.limit - (begun - started)
            if left_s < _LEAST_S:
                tell(f"round {number}/{plan.rounds}: the time is over before {index}/{len(tasks)}")
                return gathered.results(settings)
            reply = run(replace(asked, timeout_s=min(asked.timeout_s, left_s)))
            is_cut = left_s < asked.timeout_s and reply.problem == "failed"  # by the end of the run, so no failure
            gathered.take(asked, Reply(figures=reply.figures) if is_cut else reply, long_s=plan.long)
            keep(gathered.results(settings))
            spent_s = time.perf_counter() - begun
            tell(f"round {number}/{plan.rounds}, {index}/{len(tasks)}: {describe(asked, reply)} [{spent_s:.1f} s]")
        tell(f"round {number} of {plan.rounds} done after {time.perf_counter() - started:.0f} s")
    return gathered.results(settings)


def _make_files(plan: Plan, gathered: Gathered, *, run: Runner, tell: Tell) -> None:
    """Make missing files with all processors, so that their time and memory are not those of measured processes."""
    failures: dict[Path, Reply] = {}  # several engines may run one file
    for task in plan.tasks():
        place = place_of(task.engine.file, work=Path(plan.work), size=task.size)
        if not task.engine.file or place.exists():
            continue
        if place in failures:
            gathered.take(task, failures[place], long_s=plan.long)
            continue
        begun = time.perf_counter()
        reply = run(replace(task, only_files=True, threads=os.cpu_count() or 1))
        if reply.problem:
            failures[place] = reply
            gathered.take(task, reply, long_s=plan.long)
        tell(f"file of {describe(task, reply)} [{time.perf_counter() - begun:.1f} s]")


def describe(task: Task, reply: Reply) -> str:
    """One line of progress."""
    head = f"{task.size} {task.engine.name}"
    if task.engine.section == "machine":
        figures = [f"{figure.engine} {figure.rate / 1e9:.1f} G/s" for figure in reply.figures]
    else:
        figures = [f"{figure.part} {figure.batch}: {figure.rate:.2f}/s" for figure in reply.figures]
    problem = [f"{reply.problem}: {_without_places(reply.reason, work=task.work)}"] if reply.problem else []
    return f"{head} {', '.join(figures + problem)}"


def _four_digits(number: float) -> float:
    return float(f"{number:.4g}")


def _without_places(reason: str, *, work: str) -> str:
    """Replace paths of this machine, which must not appear on the page."""
    for place, name in ((work, "WORK"), (sys.prefix, "PYTHON"), (str(ROOT), "ROOT")):
        reason = reason.replace(place, name)
    return reason
