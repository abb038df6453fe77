"""`doctor --plan`: the memory that a model needs on each of several devices, by number format. Reads no weights."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from llama_adapter.app.models.bundle_manifest import read_manifest
from llama_adapter.app.models.checkpoints import open_clip, stream_sources
from llama_adapter.app.models.models_by_name import bundle_folder
from llama_adapter.app.models.random_model import decoder_config, parse_size, vision_config
from llama_adapter.app.models.sight import encoding_bytes
from llama_adapter.app.models.sketch import expected_forms
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.config import DecoderConfig, EngineConfig
from llama_adapter.llm.memory_plan import MemoryPlan, fitting_rows, planner_of, prefix_bytes
from llama_adapter.llm.picture_format import PictureFormat
from llama_adapter.runtime.schemes import FLOAT, QUANTISED, Precision
from llama_adapter.runtime.schemes.scheme import dtype_name
from llama_adapter.runtime.text import counted
from llama_adapter.vision.config import VisionConfig

# Rows of the table: the dtype in general, and the precision of linear layers' weights. bfloat16 needs the same memory
# as float16.
NUMBERS: Final[tuple[tuple[torch.dtype, Precision], ...]] = (
    (torch.float32, FLOAT),
    (torch.float16, FLOAT),
    *((torch.float16, precision) for precision in QUANTISED),
)
MOST_ROWS: Final = 64  # in the table; `--batch-size auto` takes more where `Capabilities.most_rows` says so
USUAL_NUMBERS: Final = (1, 2, 4, 8)
USUAL_MEMORY: Final = (21 * 10**9, 32 * 10**9, 64 * 10**9)
_GB: Final = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanJob:
    """The input of a plan. The model is that of `spec`, or a model of `size` if that is given."""

    spec: CaptionerSpec
    size: str = ""  # such as 65B
    clip: str | None = None  # path of the tower of a model of `size`; None: ViT-L/14
    num_devices: tuple[int, ...] | None = None  # None: `USUAL_NUMBERS`
    device_bytes: tuple[int, ...] | None = None  # None: `USUAL_MEMORY`
    num_rows: int = 8

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise ValueError(f"num_rows must be a whole number of at least 1, got {self.num_rows}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModel:
    """The sizes of a model."""

    name: str
    decoder: DecoderConfig
    vision: VisionConfig | None  # None if the model takes no pictures
    pictures: PictureFormat | None = None  # how pictures stand in prompts, if they are tokens of them


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePlan:
    """Memory of a model in one number format, split over some devices. Bytes are per device."""

    dtype: str
    precision: Precision
    num_devices: int
    refusal: str = ""  # why the model cannot be split; other fields are then zero
    encoder: int = 0  # only on the first device
    weights: int = 0  # of the decoder
    keys_and_values: int = 0  # the KV cache of all rows
    prefix: int = 0  # keys and values of pictures, of all rows
    computing: int = 0
    loading: int = 0  # additional memory while weights are loaded
    first: int = 0  # total of the first device
    others: int = 0  # total of each other device, without encoder; 0 for a single device
    rows: Mapping[int, int] = dataclasses.field(default_factory=dict)  # device bytes -> rows that fit, up to 64

    @property
    def numbers(self) -> str:
        """The common name of the number format."""
        if self.precision != FLOAT:
            return self.precision
        return "float16, bfloat16" if self.dtype == "float16" else self.dtype


def planned_model(job: PlanJob, *, exported: bool = True) -> PlannedModel:
    """The sizes of the job's model. Raises ValueError for an unknown size, and CheckpointError for files.

    With `exported`, as for a model with an exported encoder, CLIP may be missing; the tower is then that of ViT-L/14.
    """
    spec = job.spec
    if job.size:
        size = parse_size(job.size)
        name = f"LLaMA {job.size} with an adapter in all layers but the first"
        vision = vision_config(size)
        if job.clip is not None:
            vision = dataclasses.replace(vision, clip=open_clip(job.clip).config)
        return PlannedModel(name=name, decoder=decoder_config(size, context=spec.context), vision=vision)
    if spec.llama_dir is None:
        manifest = read_manifest(bundle_folder(spec.model))
        vision, decoder = manifest.configs(context=spec.context)
        return PlannedModel(
            name=str(manifest["name"]),
            decoder=decoder,
            vision=vision if manifest["vision"] else None,
            pictures=manifest.picture_format,
        )
    model, _ = stream_sources(spec, dtype=None, exported=exported)
    return PlannedModel(
        name=model.name,
        decoder=model.decoder_config,
        vision=model.vision_config if model.vision_state else None,
        pictures=model.picture_format,
    )


def device_plans(
    model: PlannedModel, *, num_devices: Sequence[int], device_bytes: Sequence[int], num_rows: int, padding: int = 2
) -> Iterator[DevicePlan]:
    """A plan for each number format and number of devices.

    `padding` is passed to `plan_memory`: 2 is for devices that round shapes up, which is the more cautious assumption.
    """
    plan = partial(device_plan, model, device_bytes=device_bytes, num_rows=num_rows, padding=padding)
    for (dtype, precision), parts in itertools.product(NUMBERS, num_devices):
        yield plan(dtype=dtype, precision=precision, parts=parts)


def device_plan(
    model: PlannedModel,
    *,
    dtype: torch.dtype,
    precision: Precision,
    parts: int = 1,
    device_bytes: Sequence[int],
    num_rows: int,
    padding: int = 2,
) -> DevicePlan:
    """The plan for one number format and number of devices; see `device_plans`."""
    empty = DevicePlan(dtype=dtype_name(dtype), precision=precision, num_devices=parts)
    try:
        share = model.decoder.share(0, parts) if parts > 1 else model.decoder  # the first share is the largest
    except ValueError as error:
        return dataclasses.replace(empty, refusal=str(error))
    encoder = 0
    if model.vision is not None:
        forms = expected_forms(model.vision, dtype=dtype, precision=precision)
        encoder = sum(form.num_bytes for form in forms.values())
    config = EngineConfig(
        decoder=share,
        dtype=dtype,
        kept_places=0 if model.pictures is None else share.context,
        encoding_bytes=encoding_bytes(model.pictures, model.vision, share, itemsize=dtype.itemsize),
    )
    forms = expected_forms(share, dtype=dtype, precision=precision)
    sizes = {name: form.num_bytes for name, form in forms.items()}

    def planned(reserved: int) -> Callable[[int], MemoryPlan]:
        return planner_of(config, forms, sizes, padding=padding, reserved=reserved)

    first, others = planned(encoder), planned(0)
    plan = first(num_rows)
    prefix = prefix_bytes(dataclasses.replace(config, num_slots=num_rows))
    return dataclasses.replace(
        empty,
        encoder=encoder,
        weights=plan.weights - encoder,
        keys_and_values=plan.slots - prefix,
        prefix=prefix,
        computing=plan.activations,
        loading=plan.loading,
        first=plan.total,
        others=0 if parts == 1 else others(num_rows).total,
        rows={free: _most_rows(first, free) for free in device_bytes},
    )


def _most_rows(planned: Callable[[int], MemoryPlan], free: int) -> int:
    """The batch size of `--batch-size auto`, which leaves a tenth of the memory free; 0 if not even one row fits."""
    if planned(1).total > free:
        return 0
    return fitting_rows(planned, free=free, most=MOST_ROWS, unknown=1)


def plan_lines(model: PlannedModel, plans: Iterable[DevicePlan], *, num_rows: int) -> list[str]:
    """The table as lines, in GB per device."""
    config, plans = model.decoder, list(plans)
    limits = list(plans[0].rows) if not plans[0].refusal else next((list(one.rows) for one in plans if one.rows), [])
    lines = [
        f"{model.name}: width {config.dim}, {config.num_layers} layers, {config.num_heads} heads, feed-forward "
        f"{config.ffn_dim}, {config.vocab_size} tokens",
        f"GB of each device, for {counted(num_rows, 'row')} of {config.context} tokens; the first device has "
        "the picture encoder too. On the right, rows that fit.",
        "",
    ]
    heads = ["numbers", "devices", "weights", "encoder", "cache", "prefix", "computing", "first", "others"]
    table = [heads + [f"{limit / _GB:g} GB" for limit in limits]]
    for one in plans:
        start = [one.numbers, str(one.num_devices)]
        if one.refusal:
            table.append([*start, one.refusal])
            continue
        sizes = [one.weights, one.encoder, one.keys_and_values, one.prefix, one.computing, one.first]
        others = [f"{one.others / _GB:.2f}" if one.others else "-"]
        fits = [str(one.rows[limit]) if one.rows[limit] else "no" for limit in limits]
        table.append([*start, *(f"{size / _GB:.2f}" for size in sizes), *others, *fits])
    return lines + table_lines(table)


def table_lines(table: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, with the numbers of a column below each other; shorter rows do not widen columns."""
    whole = [row for row in table if len(row) == len(table[0])]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in table]


def plan_json(model: PlannedModel, plans: Iterable[DevicePlan], *, num_rows: int) -> dict[str, Any]:
    """The plan as JSON values; sizes are bytes per device."""
    return {
        "model": model.name,
        "decoder": model.decoder.to_dict(),
        "batch_size": num_rows,
        "plans": [
            {
                **{name: value for name, value in dataclasses.asdict(one).items() if name != "rows"},
                "rows": [
                    {"device_bytes": limit, "rows": rows, "fits": one.first <= limit}
                    for limit, rows in one.rows.items()
                ],
            }
            for one in plans
        ],
    }
