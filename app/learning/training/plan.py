"""Predicts memory and time of a training step from shapes, before anything is loaded."""

# B rows, S tokens, Q queries, D model width, T tokens of CLIP, C width of its features

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from llama_adapter.app.learning.training.job import Parallel
from llama_adapter.app.learning.training.model import in_dtype_of
from llama_adapter.app.models.sketch import expected_forms, sketch
from llama_adapter.llm.config import DecoderConfig, EngineConfig
from llama_adapter.llm.memory_plan import planner_of
from llama_adapter.llm.training.build import DECODER_KINDS
from llama_adapter.llm.training.decoder import TrainableDecoder
from llama_adapter.llm.training.layout import IGNORED
from llama_adapter.llm.training.sketch import attend_fused, frozen_weights, packed_more, sketch_decoder
from llama_adapter.runtime.errors import TooLittleMemoryError
from llama_adapter.runtime.schemes import FLOAT
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.encoder import PictureEncoder, use_attention, use_training_forms

ENCODED_TOGETHER: Final = 16  # pictures in a batch of the encoder
SCORED_ROWS: Final = 8  # rows of the captioner that answers examples for scores
_VISUAL, _TOWER = "visual blocks", "picture tower"
_PARTS: Final = {_VISUAL: "query", _TOWER: "clip"}  # kind -> the part of the encoder
_MOMENTS: Final = 2  # AdamW's moments for each trained scalar
# How often an array of the size of all trained parameters is read or written: norm, clipping, update (fused on a CPU).
_PASSES: Final = {"cpu": 10}
_MOST_PASSES: Final = 23
_COUNTED_ROWS: Final = 64  # more rows are extrapolated linearly from half of these rows and all of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """The values that determine the memory of a run."""

    decoder: DecoderConfig
    vision: VisionConfig | None  # None: the model sees no pictures
    kinds: frozenset[str]  # the kinds of parameters that are trained, see `choice.KINDS`
    lora_rank: int
    dtype: torch.dtype  # of frozen weights and activations
    rows: int  # rows that a device computes at once
    parts: int = 1  # parts of a step, computed one after another
    tokens: int  # tokens of the longest row
    labels: int  # labels of one row
    checkpointing: bool = False
    device_type: str = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """Bytes on one device by purpose, and the work of a step."""

    frozen: int
    packing: int  # additional bytes if the frozen weights are packed for the C kernels
    trained: int  # trained weights and the optimiser's moments
    computing: int  # peak of activations and gradients
    encoding: int  # peak while pictures are encoded, before the first step
    updating: int  # gradients, and temporary memory of the optimiser
    scoring: int  # a captioner that answers examples, in addition to the model
    flops: int  # of matrix products
    frozen_flops: int  # of matrix products with the decoder's frozen weights
    traffic: int  # bytes that all other operations read and write

    @property
    def total(self) -> int:
        """The peak in bytes: weights, and the largest of the phases, which follow one another."""
        return self.frozen + self.trained + max(self.computing, self.encoding, self.updating, self.scoring)

    def packed(self) -> "StepPlan":
        """The plan if the decoder's frozen weights are packed."""
        return dataclasses.replace(self, frozen=self.frozen + self.packing, packing=0)

    def seconds(self, *, flops_per_s: float, frozen_flops_per_s: float, bytes_per_s: float) -> float:
        """Duration of a step on a device with these rates."""
        products = (self.flops - self.frozen_flops) / flops_per_s + self.frozen_flops / frozen_flops_per_s
        return products + self.traffic / bytes_per_s


def plan_step(shapes: Shapes, *, num_ranks: int = 1, kind: Parallel = "ddp") -> StepPlan:
    """The plan of one rank, if each of `num_ranks` ranks computes `shapes.rows` rows at once."""
    decoder, encoder = _decoder(shapes), _encoder(shapes)
    frozen = _bytes(decoder, trained=False) + _vision_bytes(shapes, trained=shapes.kinds)
    frozen += sum(one.nbytes for one in decoder.buffers())
    trained = _bytes(decoder, trained=True) + (0 if encoder is None else _bytes(encoder, trained=True))
    largest = max(one.nbytes for one in (*decoder.parameters(), *(() if encoder is None else encoder.parameters())))
    if shapes.device_type == "cpu":
        frozen += trained  # the initial adapter is kept in host memory
    counted = _computed(shapes)
    held, gradients, computing = (1 + _MOMENTS) * trained, trained, counted.peak
    if num_ranks > 1 and kind == "ddp":
        computing += gradients  # DDP's buckets, in which gradients are summed over ranks
    elif num_ranks > 1:
        # A rank has its part of each parameter, gradient and moment, and the whole parameters of the present layer and
        # the next one.
        layers = [sum(one.nbytes for one in layer.parameters()) for layer in decoder.decoder.layers]
        computing += 2 * max(layers) + frozen - sum(layers) + gradients // num_ranks
        frozen, held, gradients = (size // num_ranks for size in (frozen, held, gradients))
    passes = _PASSES.get(shapes.device_type, _MOST_PASSES)
    return StepPlan(
        frozen=frozen,
        packing=packed_more(decoder),
        trained=held,
        computing=computing,
        encoding=_encoding_bytes(shapes),
        updating=gradients + (2 * largest if shapes.device_type == "cpu" else gradients),
        scoring=_scoring_bytes(shapes),
        flops=counted.flops * shapes.parts,
        frozen_flops=counted.frozen_flops * shapes.parts,
        traffic=counted.traffic * shapes.parts + passes * gradients,
    )


def require_memory(plan: StepPlan, *, free: int | None, device: str) -> None:
    """Raise TooLittleMemoryError if a plan needs more than `free` bytes. If `free` is None, it is unknown: no check."""
    if free is None or plan.total <= free:
        return
    raise TooLittleMemoryError(
        f"Training needs {plan.total / 1e9:.2f} GB at its peak ({plan.frozen / 1e9:.2f} GB for frozen weights, "
        f"{plan.trained / 1e9:.2f} GB for what is trained, {plan.computing / 1e9:.2f} GB for computing), and "
        f"{free / 1e9:.2f} GB are free on {device}",
        hint="pass smaller --rows, --checkpointing, --dtype bfloat16, or --score loss; or several devices with "
        "torchrun and --parallel fsdp",
    )


def _decoder(shapes: Shapes) -> TrainableDecoder:
    decoder = sketch_decoder(
        shapes.decoder,
        trained={kind for kind in DECODER_KINDS if kind in shapes.kinds},
        lora_rank=shapes.lora_rank,
        dtype=shapes.dtype,
        device_type=shapes.device_type,
    )
    decoder.checkpoint_layers = shapes.checkpointing
    return decoder


def _encoder(shapes: Shapes) -> PictureEncoder | None:
    """The encoder if a part of it is trained."""
    if shapes.vision is None or not shapes.kinds & _PARTS.keys():
        return None
    with torch.device("meta"):
        encoder = PictureEncoder(shapes.vision)
    for kind, name in _PARTS.items():
        encoder.get_submodule(name).requires_grad_(kind in shapes.kinds)
    if shapes.device_type == "cpu":
        use_training_forms(encoder)
    else:
        use_attention(encoder, attend_fused)
    return encoder


class _Counted(NamedTuple):
    """Peak bytes, operations of all matrix products and of those with frozen weights, and bytes of other traffic."""

    peak: int
    flops: int
    frozen_flops: int
    traffic: int


@lru_cache(maxsize=8)  # the step is the same in all kinds of ranks
def _computed(shapes: Shapes) -> _Counted:
    """Memory and work of the forward and backward pass of one part of a step."""
    if shapes.rows > _COUNTED_ROWS:
        half, whole = (
            _computed(dataclasses.replace(shapes, rows=rows)) for rows in (_COUNTED_ROWS // 2, _COUNTED_ROWS)
        )
        times = (shapes.rows - _COUNTED_ROWS) / (_COUNTED_ROWS // 2)
        return _Counted(*(int(all_ + times * (all_ - some)) for some, all_ in zip(half, whole, strict=True)))
    decoder, encoder = _decoder(shapes), _encoder(shapes)
    rows, config = shapes.rows, shapes.decoder
    tokens_BS = torch.ones(rows, shapes.tokens, dtype=torch.int64)
    labels_BS = tokens_BS.clone()
    labels_BS[:, : shapes.tokens - shapes.labels] = IGNORED
    visual_query_BQD: Tensor = torch.empty(rows, config.num_queries, config.dim, dtype=shapes.dtype, device="meta")
    encoded: Tensor | None = None
    if encoder is not None and shapes.vision is not None:
        clip = shapes.vision.clip
        pixels, features = (3, clip.image_size, clip.image_size), (clip.num_features, clip.output_dim)
        sizes = pixels if _TOWER in shapes.kinds else features
        encoded = torch.empty(rows, *sizes, dtype=shapes.dtype, device="meta")
    with MetaCounter(frozen_weights(decoder)) as counter:
        if encoder is not None and encoded is not None:
            if _TOWER in shapes.kinds:
                encoded = in_dtype_of(encoded, encoder.clip)
            visual_query_BQD = in_dtype_of(encoded, encoder.query)
        loss, _ = decoder(tokens_BS, labels_BS, visual_query_BQD)
        loss.backward()
    flops = counter.flops
    if shapes.device_type != "cpu":  # fused attention, which is not counted: it computes half of the score matrix
        passes = 4 if shapes.checkpointing else 3
        flops += passes * 2 * rows * config.num_layers * config.dim * shapes.tokens * shapes.tokens
    return _Counted(counter.peak_bytes, flops, counter.frozen_flops, counter.traffic)


def _encoding_bytes(shapes: Shapes) -> int:
    """Peak bytes while pictures are encoded, without weights."""
    if shapes.vision is None or _TOWER in shapes.kinds:
        return 0
    with torch.device("meta"):
        encoder = PictureEncoder(shapes.vision).to(shapes.dtype)
    use_attention(encoder, attend_fused)
    size = shapes.vision.clip.image_size
    pixels = torch.empty(ENCODED_TOGETHER, 3, size, size, dtype=shapes.dtype, device="meta")
    with torch.no_grad(), MetaCounter() as counter:
        encoder.query(encoder.clip(pixels))
    return int(counter.peak_bytes + pixels.nbytes)


def _scoring_bytes(shapes: Shapes) -> int:
    forms = expected_forms(shapes.decoder, dtype=shapes.dtype, precision=FLOAT)
    sizes = {name: form.num_bytes for name, form in forms.items()}
    config = EngineConfig(decoder=shapes.decoder, dtype=shapes.dtype, num_slots=SCORED_ROWS)
    planned = planner_of(config, forms, sizes, padding=1, reserved=0)(SCORED_ROWS)
    return planned.total + _vision_bytes(shapes, trained=())


def _vision_bytes(shapes: Shapes, *, trained: Collection[str]) -> int:
    """Bytes of the encoder's frozen weights, if the kinds `trained` are not frozen."""
    if shapes.vision is None:
        return 0
    parts = {_PARTS[kind] for kind in trained if kind in _PARTS}
    return sum(
        tensor.numel() * shapes.dtype.itemsize
        for name, tensor in sketch(shapes.vision).state_dict().items()
        if name.partition(".")[0] not in parts
    )


def _bytes(module: nn.Module, *, trained: bool) -> int:
    return sum(one.nbytes for one in module.parameters() if one.requires_grad == trained)


def smaller(shapes: Shapes, *, num_ranks: int, batch_size: int, rows: int | None) -> Shapes:
    """The shapes of one rank, if `num_ranks` ranks share the `batch_size` examples of a step.

    A rank computes at most `rows` rows at once; None: all of its examples.
    """
    own = -(-batch_size // num_ranks)
    together = min(own, rows or own)
    return dataclasses.replace(shapes, rows=together, parts=-(-own // together))


class MetaCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that are made inside the context, as long as they live.

    `live_bytes` is the present sum and `peak_bytes` its maximum. `flops` are the floating-point operations of matrix
    products, and `frozen_flops` those of products with `frozen` weights. `traffic` is the number of bytes that all
    other operations read and write. If an operation mixes CPU tensors, such as indices, with meta tensors, the CPU
    tensors are treated as meta tensors. An operation that was seen before with tensors of the same forms is not run:
    torch derives the form of a result in Python, which takes most of the time.
    """

    def __init__(self, frozen: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = self.flops = self.frozen_flops = self.traffic = 0
        self._frozen = {id(one.untyped_storage()): one for one in frozen}
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._done: dict[Any, _Done] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tuple(args), kwargs or {}
        given = list(_tensors((args, tuple(kwargs.values()))))
        is_meta = any(one.is_meta for one in given)
        if is_meta and not all(one.is_meta for one in given):
            args, kwargs = tree_map_only(Tensor, lambda one: one.to("meta"), (args, kwargs))
        for one in given:
            self._count(one, num_bytes=0)  # no effect on known tensors; the others were made outside
        key = (func, _form(args), _form(tuple(kwargs.items())))
        done = self._done.get(key) if is_meta and not func.is_view else None
        if done is not None:
            out = args[0] if func._schema.name.endswith("_") else _again(done.form)
        else:
            out = func(*args, **kwargs)
            flops = traffic = 0
            if func._overloadpacket in flop_registry:
                flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
            elif not func.is_view:
                traffic = sum(one.numel() * one.itemsize for one in (*given, *_tensors((out,))))
            done = _Done(_form(out), flops, traffic)
            is_in_place = bool(args) and out is args[0]
            if is_meta and (is_in_place or (not func._schema.is_mutable and _are_new(out, given))):
                self._done[key] = done
        self.flops, self.traffic = self.flops + done.flops, self.traffic + done.traffic
        if done.flops and any(id(one.untyped_storage()) in self._frozen for one in given):
            self.frozen_flops += done.flops
        for one in _tensors((out,)):
            self._count(one, num_bytes=one.untyped_storage().nbytes())
        return out

    def _count(self, tensor: Tensor, *, num_bytes: int) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._seen and self._seen[key]() is storage:
            return
        self._seen[key] = weakref.ref(storage, self._forgetting(key, num_bytes))
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forgetting(self, key: int, num_bytes: int) -> Callable[[Any], None]:
        def forget(reference: Any) -> None:
            self.live_bytes -= num_bytes
            if self._seen.get(key) is reference:
                del self._seen[key]

        return forget


class _Done(NamedTuple):
    """What an operation gives."""

    form: Any  # of its result
    flops: int
    traffic: int


class _Form(NamedTuple):
    """A tensor without its numbers."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


def _form(value: Any) -> Any:
    """A value with forms in place of tensors, which can be the key of a dictionary."""
    if isinstance(value, Tensor):
        return _Form(value.shape, value.stride(), value.dtype)
    return tuple(map(_form, value)) if isinstance(value, tuple | list) else (type(value), value)


def _are_new(out: Any, given: Iterable[Tensor]) -> bool:
    """Whether no tensor of a result has the storage of a given one, as that of `_unsafe_view` has."""
    storages = {one.untyped_storage()._cdata for one in given}
    return all(one.untyped_storage()._cdata not in storages for one in _tensors((out,)))


def _again(form: Any) -> Any:
    """New tensors on the meta device in place of forms."""
    if isinstance(form, _Form):
        return torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device="meta")
    return tuple(map(_again, form)) if isinstance(form, tuple) else form


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a value of tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)
