"""The rounds of a run: each round measures every engine once, each in its own process, one at a time."""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scripts.common import ROOT, Tell
from scripts.peers.results import INSTRUCTIONS, Key, Missing, Results, Row
from scripts.peers.sizes import ENCODERS, JOB_ENCODERS, JOB_ENDS, NUM_STEPS, place_of
from scripts.peers.table import MACHINE, Engine, Section, chosen_engines, engine_names
from scripts.peers.task import Reply, Rung, Task

# Variables that set a child's number of threads in every library.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# Limits on the instruction sets of our kernels, of torch and of oneDNN.
_CAPS = {
    "best": {},
    "avx2": {"LLAMA_ADAPTER_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}
_QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "ORT_DISABLE_TELEMETRY": "1"}

Runner = Callable[[Task], Reply]


# Without slots, so that defaults can be read as class attributes.
@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run measures, as plain values."""

    sections: tuple[Section, ...] = ("decode", "job", "vision")
    sizes: tuple[str, ...] = ("1B", "160M", "ViT-L/14")  # of decoders and encoders
    engines: tuple[str, ...] = tuple(engine_names())
    batch_sizes: tuple[int, ...] = (1, 5, 16)
    prefill_batch_sizes: tuple[int, ...] = (1, 5)
    rounds: int = 3
    threads: int = 1
    work: str = str(Path(tempfile.gettempdir()) / "llama-adapter-peers")
    budget: float = 2.5  # seconds
    long: float = 8.0  # seconds; a measurement that took longer in the first round is not repeated
    instructions: str = INSTRUCTIONS[0]
    processor: str = ""

    def tasks(self) -> Iterator[Task]:
        """All tasks of one round, in order; the ceilings of the machine are measured before each size."""
        for size in self.sizes:
            yield self._task(MACHINE, size)
            section: Section = "vision" if size in ENCODERS else "decode"
            if section in self.sections:
                for engine in chosen_engines(self.engines, section):
                    yield self._task(engine, size)
            if "job" in self.sections:
                for encoder in JOB_ENCODERS.get(size, ()):
                    for engine in chosen_engines(self.engines, "job"):
                        yield self._task(engine, f"{size}+{encoder}")

    def _task(self, engine: Engine, size: str) -> Task:
        prefills: list[Rung] = [("prefill", batch) for batch in self.prefill_batch_sizes]
        rungs: dict[Section, list[Rung]] = {
            "machine": [("ceiling", 1)],
            "decode": [*prefills, *(("decode", batch) for batch in self.batch_sizes)],
            "job": [("job", len(JOB_ENDS))],
            "vision": [("vision", batch) for batch in self.batch_sizes],
        }
        return Task(
            engine=engine,
            size=size,
            work=self.work,
            threads=self.threads,
            rungs=tuple(rungs[engine.section]),
            num_rows=max(batch for _, batch in rungs[engine.section]),
            num_steps=NUM_STEPS.get(size, 32),
            budget_s=self.budget,
            instructions=self.instructions,
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
    """Make the files, then measure round by round; `keep` gets all results so far after each round.

    `run` answers a task, by default in a child process. An engine that fails or is missing is skipped from then on.
    """
    run = run or run_child
    gathered = Gathered(run=datetime.now(UTC).isoformat(timespec="seconds"))
    settings = {"rounds": plan.rounds, "budget_s": plan.budget, "long_s": plan.long, "flash": "auto"}
    _make_files(plan, gathered, run=run, tell=tell)
    results = Results()
    started = time.perf_counter()
    for number in range(1, plan.rounds + 1):
        tasks = list(plan.tasks())
        for index, task in enumerate(tasks, start=1):
            asked = gathered.next_task(task)
            if asked is None:
                continue
            begun = time.perf_counter()
            reply = run(asked)
            gathered.take(asked, reply, long_s=plan.long)
            spent_s = time.perf_counter() - begun
            tell(f"round {number}/{plan.rounds}, {index}/{len(tasks)}: {describe(asked, reply)} [{spent_s:.1f} s]")
        results = gathered.results(settings)
        keep(results)
        tell(f"round {number} of {plan.rounds} done after {time.perf_counter() - started:.0f} s")
    return results


def run_child(task: Task, *, timeout_s: float = 600.0) -> Reply:
    """Answer a task in a child process. A crash or a timeout is a failure in the reply."""
    environment = {
        **os.environ,
        **_QUIET,
        **_CAPS[task.instructions],
        **dict.fromkeys(_THREAD_VARIABLES, str(task.threads)),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "scripts.peers.child"],
            input=pickle.dumps(task),
            cwd=ROOT,
            env=environment,
            capture_output=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return Reply(problem="failed", reason=f"took longer than {timeout_s:.0f} s")
    if done.returncode != 0:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        return Reply(problem="failed", reason=f"ended with status {done.returncode}: {last}")
    reply: Reply = pickle.loads(done.stdout)
    return reply


def describe(task: Task, reply: Reply) -> str:
    """One line of progress."""
    head = f"{task.size} {task.engine.name}"
    if reply.problem:
        return f"{head} {reply.problem}: {reply.reason}"
    if task.engine == MACHINE:
        figures = [f"{figure.engine} {figure.rate / 1e9:.1f} G/s" for figure in reply.figures]
    else:
        figures = [f"{figure.part} {figure.batch}: {figure.rate:.2f}/s" for figure in reply.figures]
    return f"{head} {', '.join(figures)}"


def _four_digits(number: float) -> float:
    return float(f"{number:.4g}")


def _without_places(reason: str, *, work: str) -> str:
    """Replace paths of this machine, which must not appear on the page."""
    for place, name in ((work, "WORK"), (sys.prefix, "PYTHON"), (str(ROOT), "ROOT")):
        reason = reason.replace(place, name)
    return reason


def _make_files(plan: Plan, gathered: Gathered, *, run: Runner, tell: Tell) -> None:
    """Make missing files that other programs run, before the rounds and with all processors."""
    Path(plan.work).mkdir(parents=True, exist_ok=True)
    for task in plan.tasks():
        file = task.engine.file
        if not file or place_of(file, work=Path(plan.work), size=task.size).exists():
            continue
        reply = run(replace(task, only_files=True, threads=os.cpu_count() or 1))
        if reply.problem:
            gathered.take(task, reply, long_s=plan.long)
        tell(f"files of {task.size} {task.engine.name}: {reply.reason or f'made, {reply.load_s:.1f} s'}")
