"""How every engine is measured: calls, repetitions, and which repetitions count."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from llama_adapter.runtime.ceilings import in_large_pages
from scripts.peers.sizes import NUM_PROMPT_TOKENS, prompt_ids
from scripts.peers.table import Figure, Rung

Encode = Callable[[NDArray[np.uint8]], object]  # encodes pixels (B, S, S, 3), and returns when the result is ready
Result = TypeVar("Result")

MIN_STEPS = 4
_MAX_CALLS = 5  # at most, for a prefill or an encoder
_NUM_WARM_UP_TOKENS = 8
_NUM_REHEARSALS = 3  # torch.compile compiles in the first call, and captures in the third
_READ_BYTES = 256 << 20  # read between two steps; far larger than any cache
_REST_S = 0.001  # time until our kernels' threads sleep


class DecoderEngine(Protocol):
    """A language model that decodes rows greedily. Rows in use are 0..n-1, all at the same position."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Clear the cache and compute prompts of equal length; returns the next token of each."""
        ...

    def spread(self, num_rows: int) -> None:
        """After a prefill of one row, make rows 1..num_rows-1 copies of it."""
        ...

    def step(self, token_ids: Sequence[int], position: int) -> list[int]:
        """Feed one token to each row at this position; returns the next token of each."""
        ...


class MemoryReader:
    """Measures the current memory bandwidth. Its threads sleep between measurements."""

    def __init__(self, *, num_threads: int) -> None:
        self._parts = in_large_pages(_READ_BYTES).chunk(num_threads)
        self._threads = ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,))
        self.read()  # starts the threads

    def read(self) -> float:
        """Sum the buffer, one part per thread; returns bytes per second."""
        time.sleep(_REST_S)
        started = time.perf_counter()
        for _ in self._threads.map(torch.sum, self._parts):
            pass
        return _READ_BYTES / (time.perf_counter() - started)


def measure_decoder(
    engine: DecoderEngine,
    rungs: Collection[Rung],
    *,
    num_steps: int,
    budget_s: float,
    reader: MemoryReader | None = None,
    rehearse: bool = False,
) -> Iterator[Figure]:
    """Prefill and decode rates in tokens per second, by batch size.

    If the prefill of a batch size is not measured, its rows are copies of the first. After a warm-up step, at least 4
    steps are measured, up to `num_steps` or `budget_s`; the median counts. With a reader, the memory bandwidth, which
    bounds steps of one row, is measured after each of these steps. With `rehearse`, the same calls run before, so that
    whatever is compiled or captured for their shapes is there.
    """
    if not rehearse:
        engine.prefill([prompt_ids(0, length=_NUM_WARM_UP_TOKENS)])
        engine.step([5], _NUM_WARM_UP_TOKENS)
    for batch in dict.fromkeys(batch for _, batch in rungs):
        token_ids: list[int] = []
        if ("prefill", batch) in rungs:
            prefill = functools.partial(engine.prefill, [prompt_ids(row) for row in range(batch)])
            seconds, spent_s, token_ids = _repeated(prefill, budget_s=budget_s, rehearse=rehearse)
            yield Figure(part="prefill", batch=batch, rate=batch * NUM_PROMPT_TOKENS / seconds, spent_s=spent_s)
        if ("decode", batch) in rungs:
            if not token_ids:
                token_ids = _fill(engine, batch)
            started = time.perf_counter()
            if rehearse:
                _time_steps(engine, token_ids, num_steps=num_steps, budget_s=math.inf, reader=None)
                token_ids = _fill(engine, batch)
            step_s, read = _time_steps(
                engine, token_ids, num_steps=num_steps, budget_s=budget_s, reader=reader if batch == 1 else None
            )
            spent_s = time.perf_counter() - started
            rate = batch / statistics.median(step_s)
            yield Figure(part="decode", batch=batch, rate=rate, spent_s=spent_s, read=read)


def _fill(engine: DecoderEngine, batch: int) -> list[int]:
    """Prefill the first row and copy it; returns the next token of each row."""
    token_ids = engine.prefill([prompt_ids(0)]) * batch
    engine.spread(batch)
    return token_ids


def _time_steps(
    engine: DecoderEngine, token_ids: list[int], *, num_steps: int, budget_s: float, reader: MemoryReader | None
) -> tuple[list[float], float]:
    """Seconds of each step, and the median of the bandwidths measured between them (0 without a reader)."""
    seconds: list[float] = []
    reads: list[float] = []
    for number in range(1 + num_steps):
        started = time.perf_counter()
        token_ids = engine.step(token_ids, NUM_PROMPT_TOKENS + number)
        seconds.append(time.perf_counter() - started)
        if reader is not None:
            reads.append(reader.read())
        if sum(seconds) > budget_s and len(seconds) > MIN_STEPS:
            break
    return seconds[1:], statistics.median(reads) if reads else 0.0


def measure_vision(
    encode: Encode, rungs: Collection[Rung], *, image_size: int, budget_s: float, rehearse: bool = False
) -> Iterator[Figure]:
    """Pictures per second at every batch size, with random pixels. `rehearse` as in `measure_decoder`."""
    batches = [batch for _, batch in rungs]
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (max(batches), image_size, image_size, 3), dtype=np.uint8)
    if not rehearse:
        encode(pixels[: batches[0]])
    for batch in batches:
        call = functools.partial(encode, pixels[:batch])
        seconds, spent_s, _ = _repeated(call, budget_s=budget_s, rehearse=rehearse)
        yield Figure(part="vision", batch=batch, rate=batch / seconds, spent_s=spent_s)


def _repeated(call: Callable[[], Result], *, budget_s: float, rehearse: bool) -> tuple[float, float, Result]:
    """Call once or repeatedly within `budget_s`: the median seconds of a call, all seconds, and the last result."""
    begun = time.perf_counter()
    for _ in range(_NUM_REHEARSALS if rehearse else 0):
        call()
    seconds: list[float] = []
    while not seconds or (len(seconds) < _MAX_CALLS and sum(seconds) + seconds[-1] < budget_s):
        started = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - started)
    return median_of_warm(seconds), time.perf_counter() - begun, result


def median_of_warm(seconds: Sequence[float]) -> float:
    """The median; with three or more calls the first one is left out as a warm-up."""
    return statistics.median(seconds[1:] if len(seconds) >= 3 else seconds)
