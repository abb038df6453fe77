"""Measures the ceilings of a device: memory bandwidth and the rate of matrix products."""

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from llama_adapter.runtime.devices import Backend
from llama_adapter.runtime.schemes import FLOAT, Precision
from llama_adapter.runtime.schemes.layers import store_parts
from llama_adapter.runtime.schemes.scheme import find_scheme

_HOST_BUFFER, _DEVICE_BUFFER = 512 << 20, 4 << 30  # bytes; far above any cache
_NUM_ROWS = (257, 1024)  # of matrix products: one picture's tokens, and a large prefill
_MORE_ROWS = 4096  # on a device with a queue, which is not busy with fewer
_REPEATS = 5
_CALLS_IN_QUEUE = 5  # between two waits, which would otherwise be a large part of the time


@torch.inference_mode()
def measure_bandwidth(backend: Backend) -> float:
    """Bytes per second: the better of summing a buffer, and of copying one half of it to the other."""
    is_host, free = backend.device.type == "cpu", backend.free_bytes()
    num_bytes = _HOST_BUFFER if is_host else _DEVICE_BUFFER
    num_bytes = num_bytes if free is None else max(min(num_bytes, free // 4), 1 << 20)
    buffer = in_large_pages(num_bytes) if is_host else torch.ones(num_bytes // 4, device=backend.device)
    target, source = buffer.chunk(2)
    return num_bytes / min(best_seconds(backend, work) for work in (buffer.sum, lambda: target.copy_(source)))


def in_large_pages(num_bytes: int) -> torch.Tensor:
    """Ones in float32, on the host. numpy asks for large pages, as the kernels do for weights; torch does not."""
    return torch.from_numpy(np.ones(num_bytes // 4, np.float32))


@torch.inference_mode()
def measure_matmul(
    backend: Backend,
    *,
    shapes: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    precision: Precision = FLOAT,
) -> float:
    """FLOP per second of linear layers with these shapes (inputs, outputs), run in turn.

    It is the best rate of some numbers of rows. The backend packs their weights as it packs those of a model.
    """
    layers = nn.ModuleList(nn.Linear(*shape, device=backend.device, dtype=dtype) for shape in shapes)
    layers.requires_grad_(False)
    scheme = find_scheme(precision)
    if scheme.weight_dtype is not None:
        for layer in layers:
            assert isinstance(layer, nn.Linear)
            parts = scheme.quantise(layer.weight)
            store_parts(layer, {suffix: part.to(backend.device) for suffix, part in parts.items()})
    backend.prepare(layers)
    rates = []
    for rows in (*_NUM_ROWS, _MORE_ROWS) if backend.capabilities.queued else _NUM_ROWS:
        inputs = [torch.randn(rows, shape[0], device=backend.device, dtype=dtype) for shape in shapes]

        def work(inputs: list[torch.Tensor] = inputs) -> None:
            for layer, x in zip(layers, inputs, strict=True):
                layer(x)

        rates.append(2 * rows * sum(map(math.prod, shapes)) / best_seconds(backend, work))
    return max(rates)


def best_seconds(backend: Backend, work: Callable[[], object]) -> float:
    """Seconds of `work` in the shortest of a few repetitions, after a warm-up. The device is synchronised before each.

    With a queue, a repetition is several calls.
    """
    seconds, calls = [], _CALLS_IN_QUEUE if backend.capabilities.queued else 1
    for _ in range(1 + _REPEATS):
        backend.synchronise()
        started = time.perf_counter()
        for _ in range(calls):
            work()
        backend.synchronise()
        seconds.append((time.perf_counter() - started) / calls)
    return min(seconds[1:])
