"""`train --plan`: memory and time of a step on one or several devices. Also makes the plan of a run that starts."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn import functional

from llama_adapter.app.learning.training.job import Parallel, TrainJob
from llama_adapter.app.learning.training.plan import Shapes, StepPlan, plan_step, smaller
from llama_adapter.app.models.checkpoints import open_clip
from llama_adapter.app.models.plan import PlanJob, PlannedModel, planned_model, table_lines
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.training.frozen import PackedWeight, find_kernels, times, times_back
from llama_adapter.runtime.ceilings import best_seconds
from llama_adapter.runtime.devices import Backend
from llama_adapter.runtime.schemes.scheme import dtype_name
from llama_adapter.vision.config import VisionConfig

_GB: Final = 1e9
_TOKENS: Final = 512  # tokens in the measurement of rates
_OUTPUTS: Final = 1024  # of its matrix products on a CPU, which reaches its rate with fewer than a layer has
_UNCACHED: Final = 1 << 27  # bytes; more than almost any cache holds
_LABELS: Final = 8  # without data, one in 8 tokens of a row is assumed to be a label


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The rates that a device reaches."""

    flops_per_s: float  # of matrix products
    frozen_flops_per_s: float  # of matrix products with the decoder's frozen weights
    bytes_per_s: float  # of reading and writing memory


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """The parameters of `--plan`."""

    size: str = ""  # such as 7B; empty: the model of the job
    num_devices: tuple[int, ...] = (1, 8)
    tokens: int | None = None  # tokens of a row; None: the longest row of the data, or without data the context
    device_type: str = "cpu"
    dtype: torch.dtype = torch.float32
    rates: Rates | None = None  # None: the rates of this machine's device are measured


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One row of the table."""

    num_devices: int
    kind: str  # ddp or fsdp; "" for one device
    rows: int
    plan: StepPlan
    seconds: float  # duration of a step


def sizes_of(job: TrainJob, size: str = "") -> PlannedModel:
    """The sizes of the job's model with its adapter, or of a model of this `size`, such as 7B. Reads no weights.

    Raises ValueError for an unknown size, and CheckpointError if files of the model cannot be read.
    """
    found, choice = planned_model(PlanJob(spec=job.spec, size=size)), job.choice
    if size or not job.spec.is_llama_alone:
        return found
    layers = choice.num_adapter_layers(found.decoder.num_layers)
    decoder = dataclasses.replace(found.decoder, num_adapter_layers=layers, num_queries=choice.num_queries)
    vision = None
    if choice.clip is not None:
        query = choice.query_config(output_dim=decoder.dim)
        vision = VisionConfig(clip=open_clip(choice.clip).config, query=query)
    return dataclasses.replace(found, decoder=decoder, vision=vision)


def shapes_of(
    job: TrainJob,
    model: PlannedModel,
    *,
    dtype: torch.dtype,
    device_type: str,
    tokens: int,
    labels: int,
) -> Shapes:
    """The shapes of a step that one device computes at once."""
    return Shapes(
        decoder=model.decoder,
        vision=model.vision,
        kinds=job.choice.kinds,
        lora_rank=job.choice.lora_rank,
        dtype=dtype,
        rows=job.optimisation.batch_size,
        tokens=tokens,
        labels=labels,
        checkpointing=job.checkpointing,
        device_type=device_type,
    )


def planned_runs(job: TrainJob, shapes: Shapes, *, num_devices: Sequence[int], rates: Rates) -> Iterator[PlannedRun]:
    """A plan for each number of devices; with several devices, one for DDP and one for FSDP."""
    for count in num_devices:
        own = smaller(shapes, num_ranks=count, batch_size=job.optimisation.batch_size, rows=job.optimisation.rows)
        kinds: tuple[Parallel, ...] = ("ddp", "fsdp") if count > 1 else ("ddp",)
        for kind in kinds:
            plan = dataclasses.replace(plan_step(own, num_ranks=count, kind=kind), scoring=0)
            if kind == "ddp" and find_kernels(shapes.device_type, shapes.dtype) is not None:
                plan = plan.packed()
            yield PlannedRun(
                num_devices=count,
                kind=kind if count > 1 else "",
                rows=own.rows,
                plan=plan,
                seconds=plan.seconds(**dataclasses.asdict(rates)),
            )


@torch.inference_mode()
def measured_rates(backend: Backend, *, decoder: DecoderConfig, dtype: torch.dtype) -> Rates:
    """The rates of this machine's device in training, measured with layers of the model's widths."""
    options: dict[str, Any] = {"dtype": dtype, "device": backend.device}
    x_TD = torch.randn(_TOKENS, decoder.dim, **options)
    outputs = decoder.ffn_dim if backend.capabilities.queued else min(decoder.ffn_dim, _OUTPUTS)
    weight_FD = torch.randn(outputs, decoder.dim, **options)
    count = -(-_UNCACHED // (_TOKENS * decoder.ffn_dim * dtype.itemsize))
    many_TF = [torch.ones(_TOKENS, decoder.ffn_dim, **options) for _ in range(count)]
    kernels = find_kernels(backend.device.type, dtype)
    frozen = weight_FD if kernels is None else PackedWeight(weight_FD, library=kernels)
    products, frozen_products = (
        best_seconds(backend, lambda weight=weight: times_back(times(x_TD, weight), weight))  # type: ignore[misc]
        for weight in (weight_FD, frozen)
    )
    others = best_seconds(backend, lambda: [functional.silu(y_TF).mul_(y_TF) for y_TF in many_TF])
    flops = 4 * _TOKENS * weight_FD.numel()
    return Rates(
        flops_per_s=flops / products,
        frozen_flops_per_s=flops / frozen_products,
        bytes_per_s=5 * sum(one.nbytes for one in many_TF) / others,
    )


def run_plan(job: TrainJob, request: PlanRequest, *, backend: Backend, as_json: bool) -> str:
    """The plan as text or JSON."""
    model = sizes_of(job, request.size)
    tokens = request.tokens or model.decoder.context
    shapes = shapes_of(
        job,
        model,
        dtype=request.dtype,
        device_type=request.device_type,
        tokens=tokens,
        labels=max(1, tokens // _LABELS),
    )
    rates = request.rates or measured_rates(backend, decoder=model.decoder, dtype=request.dtype)
    runs = list(planned_runs(job, shapes, num_devices=request.num_devices, rates=rates))
    if as_json:
        return json.dumps(_as_json(model, shapes, runs, rates=rates), indent=1)
    return "\n".join(_lines(job, model, shapes, runs, rates=rates, is_measured=request.rates is None))


def _lines(
    job: TrainJob,
    model: PlannedModel,
    shapes: Shapes,
    runs: Sequence[PlannedRun],
    *,
    rates: Rates,
    is_measured: bool,
) -> Iterator[str]:
    config, batch = model.decoder, job.optimisation.batch_size
    layers = f"{config.num_layers} layers, {config.num_adapter_layers} of them with adapter"
    yield f"{model.name}: width {config.dim}, {layers}"
    again = ", activations computed twice" if job.checkpointing else ""
    yield (
        f"training {','.join(job.choice.known_sets)} in {dtype_name(shapes.dtype)}{again}: {batch} examples a step, of "
        f"{shapes.tokens} tokens each"
    )
    source = "as measured here" if is_measured else "as given"
    frozen = ""
    if rates.frozen_flops_per_s != rates.flops_per_s:
        frozen = f" ({rates.frozen_flops_per_s / 1e12:.3g} with frozen weights)"
    yield (
        f"time at {rates.flops_per_s / 1e12:.3g} TFLOP/s{frozen} and {rates.bytes_per_s / _GB:.3g} GB/s "
        f"({source}), without transfers between devices; memory in GB of each device, without that of torch itself"
    )
    yield ""
    heads = ["devices", "rows", "frozen", "trained", "computing", "peak", "TFLOP", "s a step", "examples/s"]
    table = [heads]
    for one in runs:
        plan = one.plan
        sizes = (plan.frozen, plan.trained, plan.computing, plan.total)
        table.append(
            [
                f"{one.num_devices} {one.kind}".strip(),
                str(one.rows),
                *(f"{size / _GB:.2f}" for size in sizes),
                f"{plan.flops / 1e12:.3g}",
                f"{one.seconds:.3g}",
                f"{batch / one.seconds:.3g}",
            ]
        )
    yield from table_lines(table)


def _as_json(model: PlannedModel, shapes: Shapes, runs: Sequence[PlannedRun], *, rates: Rates) -> dict[str, Any]:
    """The plan as JSON values. Sizes are bytes per device."""
    return {
        "model": model.name,
        "decoder": model.decoder.to_dict(),
        "dtype": dtype_name(shapes.dtype),
        "tokens": shapes.tokens,
        "checkpointing": shapes.checkpointing,
        "rates": dataclasses.asdict(rates),
        "plans": [
            {
                "devices": one.num_devices,
                "parallel": one.kind,
                "rows": one.rows,
                "seconds": one.seconds,
                "peak": one.plan.total,
                **dataclasses.asdict(one.plan),
            }
            for one in runs
        ],
    }
