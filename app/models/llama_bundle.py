"""Reads a bundle as a LLaMA and a CLIP, for adapters that were trained on top of it."""

import os
from pathlib import Path

from torch import Tensor

from llama_adapter.app.models.bundle_manifest import (
    LLM,
    VISION,
    check_sizes,
    num_ranks_of,
    read_configs,
    read_decoder,
    read_half,
    read_manifest,
    stored_tensors,
)
from llama_adapter.app.models.replaced_folder import again_if_replaced
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.weights.names import (
    BIASED,
    PARTS,
    LlamaSource,
    SplitTensor,
    checked_source,
    meta_parts,
    sizes_of,
)
from llama_adapter.runtime.devices import DTYPES
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.schemes import FLOAT
from llama_adapter.vision.weights import ClipSource

_MEANING = "the bundle is damaged; write it again with `llama-adapter convert`"


@again_if_replaced
def open_bundle(folder: str | os.PathLike[str]) -> LlamaSource:
    """The LLaMA in a bundle, memory-mapped; weights of 8 and 4 bits are dequantised.

    Norms and biases are those in the bundle, which come from the bundle's adapter. Raises CheckpointError for a damaged
    or split bundle, and if LoRA is merged into the weights, because the original LLaMA cannot be recovered. A
    bundle that is replaced while it is read is read again.
    """
    place = Path(folder)
    manifest = read_manifest(place)
    check_sizes(place, manifest)
    if num_ranks_of(manifest) > 1:
        raise CheckpointError(
            f"The bundle `{place}` is split over ranks, where a whole LLaMA is wanted",
            hint="use the bundle that it was split from",
        )
    _, config = read_configs(place, manifest)
    if config.separate_adapter_kv:
        raise CheckpointError(
            f"The bundle `{place}` has LoRA merged into its weights, so it cannot stand for a LLaMA",
            hint="name the LLaMA that it was made of as --llama-dir, and its adapter as --adapter",
        )
    state = read_decoder(place, config, manifest)
    dtype = DTYPES[manifest["dtype"]]
    plain = dict(stored_tensors(manifest).tensors(state, config, dtype=dtype, wanted=FLOAT))
    return checked_source(
        place,
        [place / LLM],
        _renamed(plain, config),
        sizes=sizes_of(config),
        config="manifest.json",
        meaning=_MEANING,
        half_split=True,
        num_heads=config.num_heads,
        norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        biases=_biases(plain, config, place=place),
    )


@again_if_replaced
def open_bundle_clip(folder: str | os.PathLike[str]) -> ClipSource:
    """The CLIP in a bundle. Raises CheckpointError for a damaged one; one that is replaced meanwhile is read again."""
    place = Path(folder)
    manifest = read_manifest(place)
    vision, _ = read_configs(place, manifest)
    state = read_half(place / VISION, vision, manifest)
    plain = stored_tensors(manifest).tensors(state, vision, dtype=DTYPES[manifest["dtype"]], wanted=FLOAT)
    tensors = {name: tensor for name, tensor in plain if name.startswith("clip.")}
    return ClipSource(name=str(place), config=vision.clip, tensors=tensors)


def _renamed(state: dict[str, Tensor], config: DecoderConfig) -> dict[str, SplitTensor]:
    found: dict[str, SplitTensor] = {}
    for name, tensor in state.items():
        if parts := meta_parts(name, config):
            rows = tensor.chunk(len(parts))
            found |= {part: SplitTensor((own,)) for part, own in zip(parts, rows, strict=True)}
    return found


def _biases(state: dict[str, Tensor], config: DecoderConfig, *, place: Path) -> dict[str, Tensor]:
    """The biases, with rows in the bundle's order; an empty dict if all are zero."""
    found: dict[str, Tensor] = {}
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        for path, parts in PARTS.items():
            each = dict(zip(parts, state[f"{prefix}{path}.bias"].chunk(len(parts)), strict=True))
            if any(bool(bias.count_nonzero()) for name, bias in each.items() if name not in BIASED):
                raise CheckpointError(
                    f"The bundle `{place}` has biases for keys or values, which no adapter's file holds",
                    hint="name the LLaMA that it was made of as --llama-dir",
                )
            found |= {f"{prefix}{name}.bias": bias for name, bias in each.items() if name in BIASED}
    return found if any(bool(bias.count_nonzero()) for bias in found.values()) else {}
