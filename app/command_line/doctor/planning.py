"""`doctor --plan`. For this machine: whether a model fits, and the least times that the measured rates allow."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from llama_adapter.app.models.plan import (
    USUAL_MEMORY,
    USUAL_NUMBERS,
    DevicePlan,
    PlanJob,
    PlannedModel,
    device_plan,
    device_plans,
    plan_json,
    plan_lines,
    planned_model,
    table_lines,
)
from llama_adapter.app.models.roofline import (
    Ceiling,
    NumberSizes,
    encoder_work,
    number_sizes,
    prefill_work,
    prefix_work,
    step_work,
)
from llama_adapter.runtime.ceilings import measure_bandwidth, measure_matmul
from llama_adapter.runtime.devices import Backend, open_best
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.schemes import FLOAT, QUANTISED, Precision

PROMPT_TOKENS: Final = 64
ANSWER_TOKENS: Final = 20
_MOST_WIDTH: Final = 2048  # of the products that are measured
_GB: Final = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The least times of one number format, in milliseconds, and pictures per second at best."""

    picture_ms: float  # the encoder, one picture
    first_token_ms: float  # encoder and prompt, one picture
    token_ms: float  # each further token, one picture
    pictures_per_s: float  # with all rows, answers of `ANSWER_TOKENS`


@dataclass(frozen=True, kw_only=True, slots=True)
class MachinePlan:
    """What this machine can do with a model."""

    device: str
    free_bytes: int
    bytes_per_s: float
    formats: Sequence[tuple[DevicePlan, float, Rates | None]]  # with FLOP/s; no rates if the model does not fit


def run_plan(job: PlanJob, *, as_json: bool) -> int:
    """Print the plan; returns the exit code. Raises UsageError for a size that does not exist.

    Unless the job names devices, what this machine can do comes first.
    """
    try:
        model = planned_model(job)
    except ValueError as error:
        raise UsageError(str(error).replace("random must", "--plan must")) from None
    numbers, memory = job.num_devices or USUAL_NUMBERS, job.device_bytes or USUAL_MEMORY
    plans = list(device_plans(model, num_devices=numbers, device_bytes=memory, num_rows=job.num_rows))
    own = None
    if job.num_devices is None and job.device_bytes is None:
        own = plan_this_machine(model, num_rows=job.num_rows)
    if as_json:
        more = {} if own is None else {"this_machine": machine_json(own)}
        print(json.dumps({**plan_json(model, plans, num_rows=job.num_rows), **more}, indent=1))
    else:
        lines = [] if own is None else [*machine_lines(own, num_rows=job.num_rows), ""]
        print(*lines, *plan_lines(model, plans, num_rows=job.num_rows), sep="\n")
    return ExitCode.OK


def plan_this_machine(model: PlannedModel, *, num_rows: int) -> MachinePlan:
    """Measure the rates of the device that `auto` selects, for some seconds, and compute times from them."""
    backend, _ = open_best()
    free = backend.free_bytes() or 0
    bandwidth = measure_bandwidth(backend)
    formats = []
    for dtype, precision in _formats(backend):
        plan = device_plan(model, dtype=dtype, precision=precision, device_bytes=(free,), num_rows=num_rows)
        width = min(model.decoder.dim, _MOST_WIDTH)
        flops = measure_matmul(backend, shapes=[(width, width)], dtype=dtype, precision=precision)
        ceiling = Ceiling(bytes_per_s=bandwidth, flops_per_s=flops)
        sizes = number_sizes(backend, dtype=dtype, precision=precision)
        rows = min(num_rows, plan.rows[free])
        rates = least_times(model, ceiling=ceiling, sizes=sizes, num_rows=rows) if rows else None
        formats.append((plan, flops, rates))
    return MachinePlan(device=backend.name, free_bytes=free, bytes_per_s=bandwidth, formats=formats)


def _formats(backend: Backend) -> Iterator[tuple[torch.dtype, Precision]]:
    floats = [torch.float32, torch.bfloat16] if backend.device.type == "cpu" else [torch.bfloat16]
    yield from ((dtype, FLOAT) for dtype in floats)
    yield from ((floats[0], precision) for precision in QUANTISED)


def least_times(model: PlannedModel, *, ceiling: Ceiling, sizes: NumberSizes, num_rows: int) -> Rates:
    """Times of the roofline model: no device is faster, and programs reach a part of it."""
    decoder = model.decoder

    def first_s(number: int) -> tuple[float, float]:
        """Seconds of the encoder, and of everything up to the first tokens."""
        encoder = 0.0
        if model.vision is not None:
            encoder, _ = ceiling.seconds(encoder_work(model.vision, num_pictures=number, sizes=sizes))
        prompts = prefill_work(decoder, lengths=[PROMPT_TOKENS] * number, num_logits=number, sizes=sizes)
        prefix = prefix_work(decoder, num_pictures=number, sizes=sizes)
        return encoder, encoder + ceiling.seconds(prefix)[0] + ceiling.seconds(prompts)[0]

    def step_s(number: int) -> float:
        middle = PROMPT_TOKENS + ANSWER_TOKENS // 2
        return ceiling.seconds(step_work(decoder, positions=[middle] * number, sizes=sizes))[0]

    picture, first = first_s(1)
    together = first_s(num_rows)[1] + (ANSWER_TOKENS - 1) * step_s(num_rows)
    return Rates(
        picture_ms=picture * 1e3,
        first_token_ms=first * 1e3,
        token_ms=step_s(1) * 1e3,
        pictures_per_s=num_rows / together,
    )


def machine_lines(plan: MachinePlan, *, num_rows: int) -> list[str]:
    """The answer as lines."""
    table = [
        ["numbers", "GB", "fits", "GFLOP/s", "encoder ms", "first token ms", "token ms", f"pictures/s, {num_rows} rows"]
    ]
    for one, flops, rates in plan.formats:
        fits = f"{one.rows[plan.free_bytes]} rows" if rates else "no"
        cells = [one.numbers, f"{one.first / _GB:.2f}", fits, f"{flops / 1e9:,.0f}"]
        if rates is not None:
            cells += [f"{value:,.3g}" for value in dataclasses.astuple(rates)]
            if one.rows[plan.free_bytes] < num_rows:
                cells[-1] += f" with {one.rows[plan.free_bytes]}"
        table.append([*cells, *["-"] * (len(table[0]) - len(cells))])
    return [
        f"This machine: {plan.device}, {plan.free_bytes / _GB:.1f} GB free; measured now: {plan.bytes_per_s / 1e9:.3g} "
        "GB/s of memory, and the rates of products below.",
        f"The least times that these allow, for a prompt of {PROMPT_TOKENS} and an answer of {ANSWER_TOKENS} tokens; "
        "`llama-adapter bench` measures a model.",
        "",
        *table_lines(table),
    ]


def machine_json(plan: MachinePlan) -> dict[str, Any]:
    """The answer as JSON values."""
    return {
        "device": plan.device,
        "free_bytes": plan.free_bytes,
        "bytes_per_s": plan.bytes_per_s,
        "formats": [
            {
                "dtype": one.dtype,
                "precision": one.precision,
                "bytes": one.first,
                "rows": one.rows[plan.free_bytes],
                "flops_per_s": flops,
                "least": None if rates is None else dataclasses.asdict(rates),
            }
            for one, flops, rates in plan.formats
        ],
    }
