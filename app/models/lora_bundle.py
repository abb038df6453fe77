"""Merges LoRA folders into a bundle while it is read."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_adapter.app.models.bundle import stream_bundle
from llama_adapter.app.models.bundle_manifest import num_ranks_of, read_manifest, stored_precision
from llama_adapter.app.models.checkpoints import StreamedModel, with_loras
from llama_adapter.app.models.packed_weights import TakePacked
from llama_adapter.app.models.sketch import sketch
from llama_adapter.llm.split import share_of, take_all
from llama_adapter.llm.weights.lora import merged_state, open_loras
from llama_adapter.llm.weights.names import sizes_of
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.ranks import ALONE, Alone
from llama_adapter.runtime.schemes import FLOAT
from llama_adapter.runtime.schemes.state import quantise


def stream_merged_bundle(
    directory: str | os.PathLike[str],
    lora: Sequence[str],
    *,
    take_packed: TakePacked | None = None,
    ranks: Alone = ALONE,
    **options: Any,
) -> StreamedModel:
    """As `stream_bundle` with `options`, and with LoRA folders merged if there are any, each FOLDER or FOLDER=WEIGHT.

    Packed weights are then unpacked. With LoRA, raises CheckpointError also for weights of 8 or 4 bits, for a split
    bundle, and for a LoRA that does not fit.
    """
    if not lora:
        return stream_bundle(directory, ranks=ranks, take_packed=take_packed, **options)
    place = Path(directory)
    manifest = read_manifest(place)
    if stored_precision(manifest) != FLOAT or num_ranks_of(manifest) > 1:
        kind = "is split over ranks" if num_ranks_of(manifest) > 1 else f"has {stored_precision(manifest)} weights"
        raise CheckpointError(
            f"The bundle `{place}` {kind}, so LoRA is not merged into it",
            hint="merge LoRA into the bundle of floats that it was made of (`llama-adapter convert --model BUNDLE "
            "--lora FOLDER --out MERGED`), then quantize, pack or split the result",
        )
    model, _ = stream_bundle(place, **options)
    config = model.decoder_config
    loras = open_loras(lora, **sizes_of(config))
    share = share_of(config, ranks)
    # Merged before they are converted, so that weights are rounded only once.
    tensors = merged_state(lambda: stream_bundle(place)[1], loras, config)
    if share is not config:
        tensors = take_all(tensors, whole=config, share=share)
    tensors = quantise(tensors, sketch(share), dtype=model.dtype, precision=model.precision)
    return with_loras(model, loras, base=model.name), tensors
