"""Measures a decoder on one and on several ranks of this machine's processors; writes docs/parallel.json and its page.

Usage: python -m scripts.bench_parallel [--size 1B] [--ranks N ...] [--rounds N] [--part NAME ...] [--out FOLDER]
       [--quick]

Weights are random, stored in float16 and computed in float32. They are stored in a whole bundle, and in a split bundle
for each number of ranks. The picture encoder is a tiny one. Every run starts new processes, and all variants run in
turn.
"""

import dataclasses
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from sentencepiece import sentencepiece_model_pb2

from llama_adapter.app.captioning.assemble import assemble_parts
from llama_adapter.app.models.bundle import save_bundle
from llama_adapter.app.models.packed_bundle import split_bundle
from llama_adapter.app.models.random_model import LLAMA_SIZES, RandomLoader, parse_size, vision_config
from llama_adapter.app.models.sketch import expected_forms
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.runners.base import DecodePlan, PrefillPlan
from llama_adapter.llm.tokenizer import Tokenizer
from scripts.bench import run_bench
from scripts.common import child_processes, in_fresh_process, in_turn, medians, process_mib, tell

PROMPT_TOKENS = 55
BATCHES = (1, 5)
NUM_STEPS = 24
COLLECTIVES = ("sum", "join", "from_first")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is measured."""

    size: Annotated[str, "size of the random model"] = "1B"
    ranks: Annotated[tuple[int, ...], "numbers of ranks"] = (1, 2, 4)
    rounds: Annotated[int, "rounds, each with all numbers of ranks"] = 3


QUICK = Settings(size="tiny", ranks=(1, 2), rounds=1)


class Way(NamedTuple):
    """A number of ranks, and whether they read a split bundle."""

    ranks: int
    is_split: bool

    @property
    def bundle(self) -> int:
        """The number of ranks that the bundle is split for; 1 for a whole bundle."""
        return self.ranks if self.is_split else 1

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {'split' if self.is_split else 'whole'} bundle"


def measure_steps(settings: Settings) -> dict[str, Any]:
    """Measure loading, prefills and decode steps for all numbers of ranks in turn."""
    with tempfile.TemporaryDirectory() as folder:
        bundles = make_bundles(Path(folder), settings)

        def run(way: Way) -> dict[str, Any]:
            measured = in_fresh_process(time_ranks, bundles[way.bundle], way.ranks)
            steps = ", ".join(f"batch {batch}: {row['decode_ms']:.1f} ms" for batch, row in measured["batches"].items())
            tell(f"{way}: loaded in {measured['load_s']:.1f} s, {steps}")
            return measured

        runs = in_turn(ways_of(settings), run, rounds=settings.rounds)
    return {
        "size": settings.size,
        "rounds": settings.rounds,
        "prompt_tokens": PROMPT_TOKENS,
        "rows": [row_of(way, found) for way, found in runs.items()],
    }


def measure_memory(settings: Settings) -> dict[str, Any]:
    """Peak memory of each rank while it loads."""
    with tempfile.TemporaryDirectory() as folder:
        bundles = make_bundles(Path(folder), settings)
        rows = []
        for way in ways_of(settings):
            rows.append({**way._asdict(), **in_fresh_process(peaks_of_ranks, bundles[way.bundle], way.ranks)})
            peaks = ", ".join(f"{peak:.0f}" for peak in rows[-1]["peaks_mib"])
            tell(f"{way}: peaks of {peaks} MiB for {rows[-1]['share_mib']:.0f} MiB of weights")
    return {"size": settings.size, "rows": rows}


def ways_of(settings: Settings) -> list[Way]:
    return [Way(ranks, is_split) for ranks in settings.ranks for is_split in (False, True) if ranks > 1 or not is_split]


def make_bundles(folder: Path, settings: Settings) -> dict[int, str]:
    """Write the bundles of a random model; returns their paths by number of ranks, 1 for the whole bundle."""
    tiny, dim = vision_config(LLAMA_SIZES["tiny"]), parse_size(settings.size).dim
    vision = dataclasses.replace(tiny, query=dataclasses.replace(tiny.query, output_dim=dim))
    model, tensors = RandomLoader(name=settings.size, vision=vision)(torch.float16)
    model = dataclasses.replace(model, tokenizer=_widened(model.tokenizer, model.decoder_config.vocab_size))
    made = {1: str(save_bundle(folder / "whole", model=model, decoder_tensors=tensors))}
    for ranks in settings.ranks:
        if ranks > 1:
            made[ranks] = str(split_bundle(made[1], folder / str(ranks), num_ranks=ranks))
    return made


def _widened(tokenizer: Any, num_pieces: int) -> Any:
    """The tokenizer, padded to `num_pieces` pieces with pieces that no text contains."""
    proto: Any = sentencepiece_model_pb2  # its classes are created at import
    content = proto.ModelProto.FromString(tokenizer.data)
    for number in range(len(content.pieces), num_pieces):
        content.pieces.add(piece=f"\uf8ff{number}", score=-1e6)
    return Tokenizer.from_bytes(content.SerializeToString())


def row_of(way: Way, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the runs of one way."""
    return {
        "ranks": way.ranks,
        "is_split": way.is_split,
        "load_s": statistics.median(run["load_s"] for run in runs),
        "batches": {str(batch): medians([run["batches"][batch] for run in runs]) for batch in BATCHES},
    }


def time_ranks(bundle: str, ranks: int) -> dict[str, Any]:
    """Measure loading, prefills and decode steps. Runs in a fresh process."""
    started = time.perf_counter()
    parts = _opened(bundle, ranks)
    load_s = time.perf_counter() - started
    try:
        clock = _watch(parts.runner) if ranks > 1 else _Clock()
        return {
            "load_s": load_s,
            "batches": {batch: _times(parts.runner, batch=batch, clock=clock) for batch in BATCHES},
        }
    finally:
        parts.close()


def peaks_of_ranks(bundle: str, ranks: int) -> dict[str, Any]:
    """Sample each rank's private memory every 5 ms while it loads, without mapped files, in a fresh process."""
    own, peaks, is_loaded = os.getpid(), dict[int, float](), threading.Event()
    base_mib = process_mib(own, "RssAnon")

    def watch() -> None:
        while not is_loaded.wait(0.005):
            for process in (own, *_rank_processes(own)):
                with suppress(OSError):  # the process has ended
                    peaks[process] = max(peaks.get(process, 0.0), process_mib(process, "RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        parts = _opened(bundle, ranks)
    finally:
        is_loaded.set()
        watcher.join()
    forms = expected_forms(parts.runner.config.decoder, dtype=torch.float32)
    parts.close()
    share_mib = sum(form.num_bytes for form in forms.values()) / 2**20
    return {"base_mib": base_mib, "share_mib": share_mib, "peaks_mib": list(peaks.values())}


def _opened(bundle: str, ranks: int) -> Any:
    return assemble_parts(CaptionerSpec(model=bundle, tensor_parallel=ranks, batch_size=max(BATCHES), dtype="float32"))


class _Clock:
    """Seconds spent in collectives, and the number of calls."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - started
                self.calls += 1

        return run


def _watch(runner: Any) -> _Clock:
    """Time the collectives of the first rank, including its wait for other ranks."""
    clock, own = _Clock(), runner._runner
    kernels = getattr(own, "_ranks", None)
    ranks = own._decoder.ranks if kernels is None else kernels.ranks
    for name in COLLECTIVES:
        setattr(ranks, name, clock.timed(getattr(ranks, name)))
    runner._channel.send = clock.timed(runner._channel.send)
    return clock


def _times(runner: Any, *, batch: int, clock: _Clock) -> dict[str, float]:
    """Median times of a prefill of `batch` prompts and of a decode step, and the share of collectives in each."""
    rows, draws = list(range(batch)), [None] * batch
    prompts = [tuple(range(3 + row, 3 + row + PROMPT_TOKENS)) for row in rows]  # with different tokens
    prefixes = [runner.empty_prefix() for _ in rows]
    prefill = PrefillPlan(rows=rows, prompts=prompts, prefixes=prefixes, draws=draws, first_slot=0)
    seconds: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": []}
    for _ in range(4):
        _timed(lambda: runner.run(prefill), clock, seconds["prefill"])
    before = clock.calls
    for count in range(NUM_STEPS):
        plan = DecodePlan(rows=rows, positions=[PROMPT_TOKENS + count] * batch, draws=draws)
        _timed(lambda plan=plan: runner.run(plan), clock, seconds["decode"])  # type: ignore[misc]
    found: dict[str, float] = {"calls": (clock.calls - before) / NUM_STEPS}
    for name, pairs in seconds.items():
        whole = statistics.median(pair[0] for pair in pairs[1:])
        found[f"{name}_ms"] = 1e3 * whole
        found[f"{name}_collectives"] = statistics.median(pair[1] / pair[0] for pair in pairs[1:])
    return found


def _timed(work: Callable[[], object], clock: _Clock, into: list[tuple[float, float]]) -> None:
    before, started = clock.seconds, time.perf_counter()
    work()
    into.append((time.perf_counter() - started, clock.seconds - before))


def _rank_processes(process: int) -> list[int]:
    return [pid for pid in child_processes(process) if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def main(arguments: Sequence[str] | None = None) -> None:
    measure = {"steps": measure_steps, "memory": measure_memory}
    run_bench(__doc__, arguments, measure=measure, page="parallel", full=Settings(), quick=QUICK)


if __name__ == "__main__":
    main()
