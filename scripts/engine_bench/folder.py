"""Throughput and memory of jobs, from one picture to many."""

import itertools
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from llama_adapter.app.captioning.captioner import Answer, Captioner, work_items
from llama_adapter.app.captioning.parts import Parts
from llama_adapter.llm.engine.sampling_params import SamplingParams
from scripts.common import in_turn, process_mib, sample_files

_MB_PER_MIB = 2**20 / 1e6


def measure_folders(parts: Parts, *, sizes: Sequence[int], rounds: int, least_pictures: int) -> list[dict[str, Any]]:
    """Run caption jobs of these sizes in turn over repeated samples, after a small warm-up job.

    Jobs below `least_pictures` are repeated. Rates and times are medians. Memory is that of the process after the first
    round, in which sizes increase.
    """
    captioner = Captioner(parts)
    _answer(captioner, pictures=parts.runner.config.num_slots)
    found = in_turn(
        sorted(sizes), lambda size: _measure(captioner, size, repeats=max(1, least_pictures // size)), rounds=rounds
    )
    results = []
    for size in sizes:
        rates, cpu_ms, resident_mb, peak_mb = zip(*found[size], strict=True)
        results.append(
            {
                "pictures": size,
                "pictures_per_s": statistics.median(rates),
                "pictures_per_s_rounds": rates,
                "cpu_ms": statistics.median(cpu_ms),
                "resident_mb": resident_mb[0],
                "peak_mb": peak_mb[0],
            }
        )
    return results


def _measure(captioner: Captioner, size: int, *, repeats: int) -> tuple[float, float, float, float]:
    """Pictures per second, processor ms per picture, resident and peak MB."""
    started, cpu_started = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        _answer(captioner, pictures=size)
    rate = size * repeats / (time.perf_counter() - started)
    cpu_ms = (time.process_time() - cpu_started) * 1e3 / (size * repeats)
    resident_mb, peak_mb = (process_mib(os.getpid(), name) * _MB_PER_MIB for name in ("VmRSS", "VmHWM"))
    return rate, cpu_ms, resident_mb, peak_mb


def _answer(captioner: Captioner, *, pictures: int) -> None:
    """Run a job as the command line does: drop answers as they arrive."""
    chosen = list(itertools.islice(itertools.cycle(map(str, sample_files())), pictures))
    items = work_items(chosen, None, default_prompt=captioner.info.default_prompt)
    answered = sum(isinstance(event, Answer) for event in captioner.run(items, sampling=SamplingParams()))
    if answered != pictures:
        raise RuntimeError(f"{pictures} pictures got {answered} answers")
