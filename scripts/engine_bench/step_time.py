"""Where the time of a decode step goes, and what a mixed step saves.

The parts of a step are linear layers, attention, other operators, and the host.
The kernels run a whole step in one call, so the parts are separated by measurement: the linear layers alone, and the
extra time of a step that attends to many positions. The cost per position also gives the cost of the picture's
positions.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from llama_adapter.app.captioning.parts import Parts
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.prompt import format_prompt
from llama_adapter.llm.runners.base import DecodePlan, MixedPlan, PrefillPlan
from llama_adapter.llm.runners.eager import EagerRunner
from llama_adapter.llm.runners.kernels import KernelRunner
from scripts.common import in_turn

NUM_PLACES = 88  # positions attended to: a prompt of 56 tokens and half a caption
_NUM_STEPS = 32
_HALF_ANSWER = 17  # tokens after a row's prompt: half of a mean caption of 4 to 64 tokens


def measure_step(parts: Parts, *, rows: int, rounds: int) -> dict[str, Any]:
    """The parts of a step of `rows` rows in ms, medians over rounds.

    `other` is the rest of the device's program: norms, rotary positions, activations, embeddings, copies. `host` is the
    time of the engine outside the program: choosing tokens, scheduling.
    """
    measured = [_round(parts, rows=rows) for _ in range(rounds + 1)][1:]  # the first one is a warm-up
    step, program, short, linears = (statistics.median(times) * 1e3 for times in zip(*measured, strict=True))
    config = parts.model.decoder_config
    picture_places = config.num_queries * config.num_adapter_layers / config.num_layers
    attention = max(program - short, 0.0) / (NUM_PLACES - 1) * (NUM_PLACES + picture_places)
    other = max(program - attention - linears, 0.0)
    host = max(step - program, 0.0)
    return {
        "rows": rows,
        "places": NUM_PLACES,
        "step_ms": step,
        "linears_ms": linears,
        "attention_ms": attention,
        "other_ms": other,
        "host_ms": host,
        "overhead_share": (other + host) / step,
    }


def _round(parts: Parts, *, rows: int) -> tuple[float, float, float, float]:
    """Seconds of a whole step, of its program, of the program at one position, and of the linear layers."""
    runner, wait = parts.runner, parts.backend.synchronise
    assert isinstance(runner, EagerRunner | KernelRunner), "its programs are called without plans"
    tokens = [index + 3 for index in range(rows)]
    return (
        _engine_step(parts, rows=rows),
        _median(lambda: runner.decode(tokens, [NUM_PLACES - 1] * rows), wait),
        _median(lambda: runner.decode(tokens, [0] * rows), wait),
        _linears(runner, parts, rows=rows),
    )


def _engine_step(parts: Parts, *, rows: int) -> float:
    """A whole step of the engine, at about as many positions as the program alone."""
    engine = Engine(parts.runner, eos_id=-1)
    prefix = parts.runner.empty_prefix()
    prompt = tuple(range(3, 3 + NUM_PLACES - _NUM_STEPS // 2))
    sampling = SamplingParams(max_new_tokens=_NUM_STEPS + 2)
    for index in range(rows):
        engine.submit(GenerateRequest(id=index, prompt_ids=prompt, prefix=prefix, sampling=sampling))
    engine.step()
    seconds = _median(engine.step, parts.backend.synchronise)
    while engine.num_unfinished:
        engine.step()
    return seconds


def _linears(runner: EagerRunner | KernelRunner, parts: Parts, *, rows: int) -> float:
    """All linear layers of a step, one after the other."""
    if isinstance(runner, KernelRunner):
        layers = [(layer, layer.struct.num_in) for layer in runner._kernels.linears]
    else:
        layers = [(layer, layer.in_features) for layer in _linear_layers(runner._decoder)]
    inputs: dict[int, Any] = {size: _input(parts, rows, size) for size in {16, *(size for _, size in layers)}}

    def run() -> None:
        for layer, size in layers:
            layer(inputs[size])

    # Subtract Python's cost of a call, measured on layers with almost no work.
    small = torch.nn.Linear(16, 16, dtype=parts.model.dtype, device=parts.backend.device).requires_grad_(False)
    holder = torch.nn.ModuleList([small])
    parts.backend.prepare(holder)
    least: Any = holder[0]
    if isinstance(runner, KernelRunner):
        inputs, least = {size: x.float().numpy() for size, x in inputs.items()}, least.layer
    with torch.inference_mode():
        whole = _median(run, parts.backend.synchronise)
        calls = _median(lambda: [least(inputs[16]) for _ in layers], parts.backend.synchronise)
    return max(whole - calls, 0.0)


def _input(parts: Parts, rows: int, size: int) -> torch.Tensor:
    return torch.randn(rows, size, device=parts.backend.device).to(parts.model.dtype)


def _linear_layers(decoder: Any) -> list[Any]:
    """Linear layers of a step, of any class. The adapter's own layers are left out: they run once per picture."""
    of_prefixes = set(decoder.adapter.modules())
    return [layer for layer in decoder.modules() if hasattr(layer, "in_features") and layer not in of_prefixes]


def _median(work: Callable[[], object], wait: Callable[[], None]) -> float:
    """Median seconds of a call that waits for the device."""
    seconds = []
    for _ in range(_NUM_STEPS):
        wait()
        started = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measure_mixed_step(parts: Parts, *, rows: int, rounds: int) -> dict[str, Any] | None:
    """Median milliseconds of a prefill of one prompt, a decode step of the other rows, and both in one program.

    `rows` slots are in use. None if the runner has no mixed steps."""
    runner = parts.runner
    if not runner.runs_mixed:
        return None
    prompt = tuple(parts.model.tokenizer.encode(format_prompt(parts.info.default_prompt)))
    decode = DecodePlan(range(rows - 1), [len(prompt) + _HALF_ANSWER] * (rows - 1), [None] * (rows - 1))
    prefill = PrefillPlan([rows - 1], [prompt], [runner.empty_prefix()], [None], first_slot=rows - 1)
    ways: dict[str, Callable[[], object]] = {
        "prefill_ms": lambda: runner.run(prefill),
        "step_ms": lambda: runner.run(decode),
        "mixed_ms": lambda: runner.run(MixedPlan(decode, prefill)),
    }

    def timed(way: str) -> float:
        started = time.perf_counter()
        ways[way]()
        parts.backend.synchronise()
        return (time.perf_counter() - started) * 1e3

    taken = in_turn(ways, timed, rounds=5 * rounds + 1)
    medians_ms = {way: statistics.median(times_ms[1:]) for way, times_ms in taken.items()}  # first round: warm-up
    runner.reset()
    return {"rows": rows, "prompt_tokens": len(prompt), **medians_ms}
