"""How every engine is measured: calls, repetitions, and which of them count."""

import functools
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from scripts.peers.sizes import NUM_PROMPT_TOKENS, Part, prompt_ids

Result = TypeVar("Result")

MIN_STEPS = 4
_MAX_CALLS = 5  # of a prefill, or of an encoder
_NUM_WARM_UP_TOKENS = 8


class DecoderEngine(Protocol):
    """A language model in rows, greedy. Rows in use are 0..n-1 and all at the same position."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Forget everything; compute prompts of equal length; the next token of each."""
        ...

    def spread(self, num_rows: int) -> None:
        """After a prefill of one row, rows 1..num_rows-1 become copies of it."""
        ...

    def step(self, token_ids: Sequence[int], position: int) -> list[int]:
        """Feed one token to each row at that position; the next token of each."""
        ...


class VisionEngine(Protocol):
    """An encoder of pictures."""

    def prepare(self, num_pictures: int) -> None:
        """Prepare for a batch size, for example compile; this time is not counted."""
        ...

    def encode(self, pixels_BHWC: NDArray[np.uint8]) -> object:
        """Encode pixels (B, S, S, 3), and wait for the result."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One result of one round: a rate per second, and the seconds spent on measuring it."""

    part: Part
    batch: int
    rate: float
    spent_s: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rungs:
    """Batch sizes to measure; `left_out` has pairs (part, batch) that an earlier round found too long to repeat."""

    batch_sizes: tuple[int, ...]
    prefill_batch_sizes: tuple[int, ...] = ()
    left_out: frozenset[tuple[str, int]] = frozenset()

    def wants(self, part: Part, batch: int) -> bool:
        """Whether this round measures that figure."""
        sizes: Collection[int] = self.prefill_batch_sizes if part == "prefill" else self.batch_sizes
        return batch in sizes and (part, batch) not in self.left_out


def measure_decoder(engine: DecoderEngine, rungs: Rungs, *, num_steps: int, budget_s: float) -> Iterator[Figure]:
    """Prefill and decode rates in tokens per second, by batch size.

    If the prefill of a batch size is not measured, its rows are copies of the first. At least 4 steps are measured, up
    to `num_steps` or `budget_s`, after a warm-up step; the median counts.
    """
    engine.prefill([prompt_ids(0, length=_NUM_WARM_UP_TOKENS)])
    engine.step([5], _NUM_WARM_UP_TOKENS)
    for batch in sorted({*rungs.batch_sizes, *rungs.prefill_batch_sizes}):
        started = time.perf_counter()
        token_ids: list[int] = []
        if rungs.wants("prefill", batch):
            prompts = [prompt_ids(row) for row in range(batch)]
            seconds, token_ids = repeated(functools.partial(engine.prefill, prompts), budget_s=budget_s)
            spent_s = time.perf_counter() - started
            rate = batch * NUM_PROMPT_TOKENS / median_of_warm(seconds)
            yield Figure(part="prefill", batch=batch, rate=rate, spent_s=spent_s)
        if rungs.wants("decode", batch):
            if not token_ids:
                token_ids = engine.prefill([prompt_ids(0)]) * batch
                engine.spread(batch)
            started = time.perf_counter()
            step_s = _time_steps(engine, token_ids, num_steps=num_steps, budget_s=budget_s)
            spent_s = time.perf_counter() - started
            yield Figure(part="decode", batch=batch, rate=batch / statistics.median(step_s), spent_s=spent_s)


def _time_steps(engine: DecoderEngine, token_ids: list[int], *, num_steps: int, budget_s: float) -> list[float]:
    seconds: list[float] = []
    for number in range(1 + num_steps):
        started = time.perf_counter()
        token_ids = engine.step(token_ids, NUM_PROMPT_TOKENS + number)
        seconds.append(time.perf_counter() - started)
        if sum(seconds) > budget_s and len(seconds) > MIN_STEPS:
            break
    return seconds[1:]


def measure_vision(engine: VisionEngine, rungs: Rungs, *, image_size: int, budget_s: float) -> Iterator[Figure]:
    """Pictures per second at every batch size, with random pixels."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (max(rungs.batch_sizes), image_size, image_size, 3), dtype=np.uint8)
    engine.prepare(1)
    engine.encode(pixels[:1])
    for batch in sorted(rungs.batch_sizes):
        if not rungs.wants("vision", batch):
            continue
        engine.prepare(batch)
        started = time.perf_counter()
        seconds, _ = repeated(functools.partial(engine.encode, pixels[:batch]), budget_s=budget_s)
        spent_s = time.perf_counter() - started
        yield Figure(part="vision", batch=batch, rate=batch / median_of_warm(seconds), spent_s=spent_s)


def repeated(call: Callable[[], Result], *, budget_s: float) -> tuple[list[float], Result]:
    """Seconds of one call or more within `budget_s`, and the result of the last one."""
    seconds: list[float] = []
    while not seconds or (len(seconds) < _MAX_CALLS and sum(seconds) + seconds[-1] < budget_s):
        started = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - started)
    return seconds, result


def median_of_warm(seconds: Sequence[float]) -> float:
    """The median; of three or more calls without the first, which is a warm-up."""
    return statistics.median(seconds[1:] if len(seconds) >= 3 else seconds)
