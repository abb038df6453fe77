"""Compares a LoRA training step with Hugging Face's LLaMA and peft; writes docs/training-speed.json and its page.

Usage: python -m scripts.bench_training [--size 160M] [--rows N] [--steps N] [--rounds N] [--part NAME ...]
       [--out FOLDER] [--quick]

The extra `peers` installs peft. Both programs train the same factors over the same random weights, on the same batch,
with torch's AdamW. Every run has a separate process, and the programs run in turn.
"""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch

from llama_adapter.runtime.devices import DTYPES
from scripts.bench import run_bench
from scripts.common import in_fresh_process, in_turn, process_mib, tell
from scripts.training_programs import Program, open_program, random_batch, random_llama

PROGRAMS: dict[str, tuple[Program, ...]] = {
    "bfloat16": ("ours", "ours, with pictures", "peft, sdpa", "peft, eager", "peft, eager, factors in bfloat16"),
    "float32": ("ours", "ours, with pictures", "peft, sdpa", "peft, eager"),
}
LEARNING_RATE = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is measured."""

    size: Annotated[str, "size of the LLaMA"] = "160M"
    rows: Annotated[int, "rows of the batch"] = 8
    steps: Annotated[int, "steps that are timed, after two warm-up steps"] = 3
    rounds: Annotated[int, "rounds, each with every program once"] = 2


QUICK = Settings(size="tiny", rows=2, steps=2, rounds=1)
THREADS = (1, 2)


def measure(settings: Settings, *, dtype: str, threads: int) -> dict[str, Any]:
    """Run the steps of all programs in turn; gives losses, times, and the speed-up of ours."""

    def run(program: Program) -> dict[str, Any]:
        measured = in_fresh_process(time_steps, program, dtype, threads, settings)
        tell(f"{dtype}, {program}, threads {threads}: {measured['step_s']:.3f} s")
        return measured

    found = in_turn(PROGRAMS[dtype], run, rounds=settings.rounds)
    rows = [{"program": program, **_row(runs)} for program, runs in found.items()]
    first = rows[0]
    return {
        "dtype": dtype,
        "threads": threads,
        "size": settings.size,
        "rows": rows,
        "num_rows": settings.rows,
        "steps": settings.steps,
        "rounds": settings.rounds,
        "batch": {name: first[name] for name in ("num_tokens", "num_places", "num_labels", "num_trained")},
        **_gain(rows),
    }


def _row(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one program: the best step time, the step times of all rounds, and the median peak memory."""
    times = [run["step_s"] for run in runs]
    peak = statistics.median(run["peak_mib"] for run in runs)
    return {**runs[0], "step_s": min(times), "step_s_of_rounds": times, "peak_mib": peak}


def _gain(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The speed-up of ours over the fastest of the others."""
    of = {row["program"]: row["step_s"] for row in rows}
    best = min((name for name in of if name.startswith("peft")), key=lambda name: float(of[name]))
    return {"best": best, "gain": of[best] / of["ours"]}


def time_steps(program: Program, dtype: str, threads: int, settings: Settings) -> dict[str, Any]:
    """Train some steps; gives the median seconds of a step, first and last loss, and the process's peak memory."""
    torch.set_num_threads(threads)
    llama, batch = random_llama(settings.size), random_batch(settings.rows)
    model, loss_of = open_program(program, llama, dtype=DTYPES[dtype])
    del llama
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
    losses, times = [], []
    for _ in range(2 + settings.steps):
        started = time.perf_counter()
        loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        times.append(time.perf_counter() - started)
    return {
        "step_s": statistics.median(times[2:]),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "peak_mib": process_mib(os.getpid(), "VmHWM"),
        "num_trained": sum(weight.numel() for weight in trained),
        "num_tokens": batch.num_tokens,
        "num_places": batch.tokens_BS.numel(),
        "num_labels": batch.num_labels,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    return run_bench(
        __doc__,
        arguments,
        measure={
            f"{dtype}_{threads}": partial(measure, dtype=dtype, threads=threads)
            for dtype in PROGRAMS
            for threads in THREADS
        },
        page="training-speed",
        packages=("peft", "transformers"),
        full=Settings(),
        quick=QUICK,
    )


if __name__ == "__main__":
    main()
