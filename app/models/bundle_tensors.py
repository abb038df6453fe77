"""The tensors in the files of a bundle: read and checked, in the form that a model needs, or as a LLaMA and a CLIP."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from llama_adapter.app.models.bundle_manifest import DAMAGED, LLM, VISION, Manifest, decoder_file, read_manifest
from llama_adapter.app.models.replaced_folder import again_if_replaced
from llama_adapter.app.models.sketch import HalfConfig, expected_forms, sketch
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.weights.names import MATRICES, LlamaSource, SplitTensor, checked_source, meta_tensors
from llama_adapter.runtime.devices import DTYPES
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.kernels.layout import PackedLayout
from llama_adapter.runtime.schemes import FLOAT, Precision
from llama_adapter.runtime.schemes.files import check_tensors
from llama_adapter.runtime.schemes.packed import PACKED, unpacked
from llama_adapter.runtime.schemes.scheme import TensorForm, find_scheme
from llama_adapter.runtime.schemes.state import Take, all_of, converted, linear_precisions, linear_shapes, quantise
from llama_adapter.runtime.tensor_files.files import read_metadata, read_safetensors
from llama_adapter.runtime.text import shown_excerpt
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.towers import ClipSource

# Gives the layout in which a device uses packed weights, for a precision and the dtype of activations; None: it cannot.
TakePacked = Callable[[Precision, torch.dtype], PackedLayout | None]


class Stored:
    """How the tensors of a bundle are stored, and how they become those of a model."""

    def __init__(self, manifest: Manifest, *, take_packed: TakePacked | None = None) -> None:
        """Without `take_packed`, packed weights are always unpacked."""
        self.layout, self.precision, self.dtype = manifest.layout, manifest.precision, DTYPES[manifest["dtype"]]
        self._finer_weights, self._precisions = manifest.finer_weights, manifest.precisions
        self._take_packed = take_packed

    def is_taken(self, wanted: Precision, dtype: torch.dtype) -> bool:
        """Whether a model in the precision `wanted` and in `dtype` uses the packed weights as they are."""
        if self.layout is None or self._take_packed is None or wanted != self.precision:
            return False
        if wanted == FLOAT and dtype != self.dtype:
            return False
        return self.layout.fits(self._take_packed(wanted, dtype), self._precisions)

    def forms(self, config: HalfConfig) -> dict[str, TensorForm]:
        """Names and forms of the stored tensors of encoder or decoder. Raises the errors of `expected_forms`."""
        return expected_forms(
            config,
            dtype=self.dtype,
            precision=self.precision,
            packed=self.layout,
            finer_weights=self._finer_weights,
        )

    def plain(self, state: Mapping[str, Tensor], config: HalfConfig) -> Iterator[tuple[str, Tensor]]:
        """The tensors of encoder or decoder as they are stored, but with packed weights unpacked."""
        if self.layout is None:
            return iter(state.items())
        return unpacked(state, linear_shapes(sketch(config)), layout=self.layout)

    def tensors(
        self,
        state: Mapping[str, Tensor],
        config: HalfConfig,
        *,
        dtype: torch.dtype,
        wanted: Precision,
        take: Take = all_of,
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors of encoder or decoder in the precision `wanted` and in `dtype`, block after block.

        If tensors are not packed, only the part that `take` returns is read of each.
        """
        module = sketch(config)
        in_order = {name: state[name] for name in self.forms(config)}
        if self.layout is None:
            return converted(in_order, module, dtype=dtype, wanted=wanted, take=take)
        if self.is_taken(wanted, dtype):
            return self._cast(in_order.items(), module, dtype=dtype)
        plain = self.plain(in_order, config)
        if wanted == self.precision:
            return self._cast(plain, module, dtype=dtype)
        if self.precision == FLOAT:
            return quantise(plain, module, dtype=dtype, precision=wanted)
        return converted(dict(plain), module, dtype=dtype, wanted=wanted)

    def _cast(
        self, tensors: Iterable[tuple[str, Tensor]], module: nn.Module, *, dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors in `dtype`, except those of packed and quantised weights."""
        precisions = linear_precisions(module, self.precision, finer_weights=self._finer_weights)
        schemes = {name: find_scheme(precision) for name, precision in precisions.items() if precision != FLOAT}
        kept = {name + suffix for name, scheme in schemes.items() for suffix in scheme.suffixes}
        for name, tensor in tensors:
            cast = [tensor if name in kept or PACKED in name else tensor.to(dtype)]
            del tensor
            yield name, cast.pop()


def read_half(path: Path, config: HalfConfig, manifest: Manifest) -> dict[str, Tensor]:
    """The tensors of encoder or decoder, mapped from its file.

    Raises CheckpointError unless names, shapes and types match the configuration. A configuration with more layers than
    the file has tensors is refused before its module is built.
    """
    state = read_safetensors(path)
    num_layers = config.clip.num_layers + config.query.depth if isinstance(config, VisionConfig) else config.num_layers
    if num_layers > len(state):  # each has several tensors
        raise CheckpointError(
            f"`{path}` has {len(state)} tensors, and its configuration speaks of {num_layers:,} layers",
            hint=DAMAGED,
        )
    check_tensors(state, forms=Stored(manifest).forms(config), path=path, hint=DAMAGED)
    if not isinstance(config, VisionConfig):
        manifest.check_finer(state)
    return state


def read_vision(manifest: Manifest, config: VisionConfig) -> dict[str, Tensor]:
    """The encoder's tensors, as `read_half`. A bundle for texts has none, and an empty `vision` in its manifest."""
    return read_half(manifest.place / VISION, config, manifest) if manifest["vision"] else {}


def read_decoder(manifest: Manifest, decoder: DecoderConfig, *, rank: int = 0) -> dict[str, Tensor]:
    """As `read_half`, for the decoder, or for a rank's part of a split decoder.

    Raises CheckpointError also for the part of another rank, which may have the same shapes.
    """
    count = manifest.num_ranks
    if count == 1:
        return read_half(manifest.place / LLM, decoder, manifest)
    path = manifest.place / decoder_file(rank, count)
    state, said = read_half(path, decoder.share(rank, count), manifest), read_metadata(path)
    if said.get("rank") != str(rank) or said.get("num_ranks") != str(count):
        told = f"rank {said['rank']} of {said.get('num_ranks')}" if "rank" in said else "no rank"
        raise CheckpointError(
            f"`{path}` holds the part of {shown_excerpt(told)}, where rank {rank} of {count} is wanted",
            hint="files were mixed up: copy the folder again, and keep the files' names",
        )
    return state


@again_if_replaced
def open_bundle(folder: str | os.PathLike[str]) -> LlamaSource:
    """The LLaMA in a bundle, memory-mapped; weights of 8 and 4 bits are dequantised.

    Norms and biases are those in the bundle, which come from the bundle's adapter. Raises CheckpointError for a damaged
    or split bundle, and if LoRA is merged into the weights, because the original LLaMA cannot be recovered. A
    bundle that is replaced while it is read is read again.
    """
    manifest = read_manifest(folder)
    manifest.check_sizes()
    place = manifest.place
    if manifest.num_ranks > 1:
        raise CheckpointError(
            f"The bundle `{place}` is split over ranks, where a whole LLaMA is wanted",
            hint="use the bundle that it was split from",
        )
    _, config = manifest.configs()
    if config.separate_adapter_kv:
        raise CheckpointError(
            f"The bundle `{place}` has LoRA merged into its weights, so it cannot stand for a LLaMA",
            hint="name the LLaMA that it was made of as --llama-dir, and its adapter as --adapter",
        )
    plain = _as_floats(manifest, read_decoder(manifest, config), config)
    tensors = {part: rows for name, one in plain for part, rows in meta_tensors(name, one, config).items()}
    has_biases = any(bool(tensor.count_nonzero()) for name, tensor in tensors.items() if name.endswith(".bias"))
    kept = {name: SplitTensor((tensor,)) for name, tensor in tensors.items() if has_biases or "bias" not in name}
    source = checked_source(
        place,
        [place / LLM],
        kept,
        config=dataclasses.replace(config, num_adapter_layers=0, num_queries=0),
        stated_in="manifest.json",
        meaning=DAMAGED,
        half_split=True,
        biased=MATRICES if has_biases else (),
    )
    return dataclasses.replace(source, contained=tuple(manifest["merged"]))


@again_if_replaced
def open_bundle_clip(folder: str | os.PathLike[str]) -> ClipSource | None:
    """The CLIP in a bundle; None in one for texts.

    Raises CheckpointError for a damaged bundle. One that is replaced meanwhile is read again.
    """
    manifest = read_manifest(folder)
    if not manifest["vision"]:
        return None
    vision, _ = manifest.configs()
    plain = _as_floats(manifest, read_vision(manifest, vision), vision)
    tensors = {name: tensor for name, tensor in plain if name.startswith("clip.")}
    return ClipSource(name=str(manifest.place / VISION), config=vision.clip, tensors=tensors)


def _as_floats(manifest: Manifest, state: Mapping[str, Tensor], config: HalfConfig) -> Iterator[tuple[str, Tensor]]:
    stored = Stored(manifest)
    return stored.tensors(state, config, dtype=stored.dtype, wanted=FLOAT)
