"""Reads a bundle as a LLaMA and a CLIP, for adapters that were trained on top of it."""

import dataclasses
import os
from pathlib import Path

from llama_adapter.app.models.bundle_manifest import LLM, VISION, check_sizes, num_ranks_of, read_configs, read_manifest
from llama_adapter.app.models.bundle_tensors import read_decoder, read_half, stored_tensors
from llama_adapter.app.models.replaced_folder import again_if_replaced
from llama_adapter.llm.weights.names import FOLDED, MATRICES, LlamaSource, SplitTensor, checked_source, meta_tensors
from llama_adapter.runtime.devices import DTYPES
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.schemes import FLOAT
from llama_adapter.vision.towers import ClipSource

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
    tensors = {part: rows for name, one in plain.items() for part, rows in meta_tensors(name, one, config).items()}
    has_biases = any(bool(tensor.count_nonzero()) for name, tensor in tensors.items() if name.endswith(".bias"))
    kept = {name: SplitTensor((tensor,)) for name, tensor in tensors.items() if has_biases or "bias" not in name}
    source = checked_source(
        place,
        [place / LLM],
        kept,
        config=dataclasses.replace(config, num_adapter_layers=0, num_queries=0),
        stated_in="manifest.json",
        meaning=_MEANING,
        half_split=True,
        biased=MATRICES if has_biases else (),
    )
    return dataclasses.replace(source, is_folded=FOLDED in manifest["merged"])


@again_if_replaced
def open_bundle_clip(folder: str | os.PathLike[str]) -> ClipSource | None:
    """The CLIP in a bundle; None in one for texts.

    Raises CheckpointError for a damaged bundle. One that is replaced meanwhile is read again.
    """
    place = Path(folder)
    manifest = read_manifest(place)
    if not manifest["vision"]:
        return None
    vision, _ = read_configs(place, manifest)
    state = read_half(place / VISION, vision, manifest)
    plain = stored_tensors(manifest).tensors(state, vision, dtype=DTYPES[manifest["dtype"]], wanted=FLOAT)
    tensors = {name: tensor for name, tensor in plain if name.startswith("clip.")}
    return ClipSource(name=str(place / VISION), config=vision.clip, tensors=tensors)
