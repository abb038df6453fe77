"""Whether a folder's size changes what a picture costs: pictures a second and memory of jobs of one to many."""

import itertools
import os
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_adapter.app.captioning.assemble import Parts
from llama_adapter.app.captioning.captioner import Answer, Captioner, work_items
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.llm.engine.sampling_params import SamplingParams

_LEAST_PICTURES = 100  # small jobs are repeated until they have answered as many in a round
_MEGABYTE = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderResult:
    """A job of `pictures`: medians over rounds. Memory is that of the process, when the jobs of that size had ended."""

    pictures: int
    pictures_per_s: float
    pictures_per_s_rounds: tuple[float, ...]
    cpu_ms: float  # of a picture, all threads together
    resident_mb: float
    peak_mb: float  # up to then; sizes go upwards in the first round


def measure_folders(parts: Parts, *, sizes: Sequence[int], rounds: int) -> list[FolderResult]:
    """Caption jobs of these sizes in turn, after a small one that is not counted. Samples are read over and over."""
    captioner = Captioner(parts)
    files = sorted(str(path) for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))
    _answer(captioner, files, pictures=parts.executor.num_slots)
    rates: dict[int, list[float]] = {size: [] for size in sizes}
    cpu_ms: dict[int, list[float]] = {size: [] for size in sizes}
    memory: dict[int, tuple[float, float]] = {}
    for number, size in itertools.product(range(rounds), sorted(sizes)):
        repeats = max(1, _LEAST_PICTURES // size)
        started, cpu_started = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            _answer(captioner, files, pictures=size)
        rates[size].append(size * repeats / (time.perf_counter() - started))
        cpu_ms[size].append((time.process_time() - cpu_started) * 1e3 / (size * repeats))
        if number == 0:
            memory[size] = _resident_mb(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MEGABYTE
    return [
        FolderResult(
            pictures=size,
            pictures_per_s=statistics.median(rates[size]),
            pictures_per_s_rounds=tuple(rates[size]),
            cpu_ms=statistics.median(cpu_ms[size]),
            resident_mb=memory[size][0],
            peak_mb=memory[size][1],
        )
        for size in sizes
    ]


def _answer(captioner: Captioner, files: Sequence[str], *, pictures: int) -> None:
    """As the command line does it: answers are let go of as they come."""
    chosen = list(itertools.islice(itertools.cycle(files), pictures))
    items = work_items(chosen, None, default_prompt=captioner.info.default_prompt)
    answered = sum(isinstance(event, Answer) for event in captioner.run(items, sampling=SamplingParams()))
    if answered != pictures:
        raise RuntimeError(f"{pictures} pictures got {answered} answers")


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _MEGABYTE
