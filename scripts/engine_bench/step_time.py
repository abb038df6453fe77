"""Where the time of a decode step goes: the model's matrix products, its attention, its other operators, and the host.

The kernels run a whole step in one call that no profiler sees into, so parts are told apart by measuring: the linear
layers by themselves, and what a step that attends to many places takes longer than one that attends to one. From that
follows what a place costs, and so what those of the picture cost that every step attends to.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from llama_adapter.app.captioning.assemble import Parts
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.model.adapter import Prefix

NUM_PLACES = 88  # attended to: a prompt of 56 tokens and half of a caption
_NUM_STEPS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """A step of `rows`, medians in ms. What is neither linear layers nor attention is overhead."""

    rows: int
    places: int
    step_ms: float
    linears_ms: float
    attention_ms: float
    other_ms: float  # of the device's program: norms, rotary positions, activations, embeddings, handing over
    host_ms: float  # of the engine around it: choosing tokens, scheduling
    overhead_share: float


def measure_step(parts: Parts, *, rows: int, rounds: int) -> StepResult:
    """Medians over `rounds`, of parts that were measured in turn."""
    decoder = _decoder(parts)
    times: dict[str, list[float]] = {"step": [], "program": [], "short": [], "linears": []}
    for number in range(rounds + 1):
        measured = _round(parts, decoder, rows=rows)
        if number:  # the first one warms up
            for name, seconds in measured.items():
                times[name].append(seconds)
    step, program, short, linears = (statistics.median(times[name]) * 1e3 for name in times)
    config = parts.model.decoder_config
    picture_places = config.num_queries * config.num_adapter_layers / config.num_layers
    attention = max(program - short, 0.0) / (NUM_PLACES - 1) * (NUM_PLACES + picture_places)
    other = max(program - attention - linears, 0.0)
    host = max(step - program, 0.0)
    return StepResult(
        rows=rows,
        places=NUM_PLACES,
        step_ms=step,
        linears_ms=linears,
        attention_ms=attention,
        other_ms=other,
        host_ms=host,
        overhead_share=(other + host) / step,
    )


def _round(parts: Parts, decoder: Any, *, rows: int) -> dict[str, float]:
    executor, wait = parts.executor, parts.backend.synchronise
    tokens = [index + 3 for index in range(rows)]
    return {
        "step": _engine_step(parts, rows=rows),
        "program": _median(lambda: executor.decode(tokens, [NUM_PLACES - 1] * rows), wait),
        "short": _median(lambda: executor.decode(tokens, [0] * rows), wait),
        "linears": _linears(decoder, parts, rows=rows),
    }


def _engine_step(parts: Parts, *, rows: int) -> float:
    """A whole step of the engine, at about as many places as the program alone is measured at."""
    engine = Engine(parts.executor, eos_id=-1)
    config = parts.model.decoder_config
    shape = (config.num_adapter_layers, 1, config.num_heads, config.num_queries, config.head_dim)
    prefix = Prefix(*(torch.zeros(shape, dtype=parts.model.dtype, device=parts.backend.device) for _ in range(2)))
    prompt = tuple(range(3, 3 + NUM_PLACES - _NUM_STEPS // 2))
    sampling = SamplingParams(max_new_tokens=_NUM_STEPS + 2)
    for index in range(rows):
        engine.submit(GenerateRequest(id=index, prompt_ids=prompt, prefix=prefix, sampling=sampling))
    engine.step()
    seconds = _median(engine.step, parts.backend.synchronise)
    while engine.num_unfinished:
        engine.step()
    return seconds


def _linears(decoder: Any, parts: Parts, *, rows: int) -> float:
    """All linear layers of a step by themselves, one after the other."""
    layers = _linear_layers(decoder)
    inputs = {size: _input(parts, rows, size) for size in {layer.in_features for layer in layers}}

    def run() -> None:
        for layer in layers:
            layer(inputs[layer.in_features])

    # What Python takes to make a call is no matrix product: as many calls of next to nothing are taken off.
    small = torch.nn.Linear(16, 16, dtype=parts.model.dtype, device=parts.backend.device).requires_grad_(False)
    holder = torch.nn.ModuleList([small])
    parts.backend.prepare(holder)
    least = _input(parts, rows, 16)
    with torch.inference_mode():
        whole = _median(run, parts.backend.synchronise)
        calls = _median(lambda: [holder[0](least) for _ in layers], parts.backend.synchronise)
    return max(whole - calls, 0.0)


def _input(parts: Parts, rows: int, size: int) -> torch.Tensor:
    return torch.randn(rows, size, device=parts.backend.device).to(parts.model.dtype)


def _decoder(parts: Parts) -> Any:
    return parts.executor._decoder  # type: ignore[attr-defined]  # no one but a benchmark asks for it


def _linear_layers(decoder: Any) -> list[Any]:
    """Those of a step, of whatever class they are; the adapter's own run once a picture."""
    of_prefixes = set(decoder.adapter.modules())
    return [layer for layer in decoder.modules() if hasattr(layer, "in_features") and layer not in of_prefixes]


def _median(work: Callable[[], object], wait: Callable[[], None]) -> float:
    """Seconds of a call, the device waited for, over as many as a caption has."""
    seconds = []
    for _ in range(_NUM_STEPS):
        wait()
        started = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
