"""Merges LoRA folders into a bundle while it is read."""

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from llama_adapter.app.models.bundle import stream_bundle
from llama_adapter.app.models.bundle_manifest import num_ranks_of, read_configs, read_manifest, stored_precision
from llama_adapter.app.models.checkpoints import StreamedModel, lora_files, lora_notes
from llama_adapter.app.models.sketch import Dtype, sketch
from llama_adapter.llm.split import share_of, take_all
from llama_adapter.llm.weights.lora import merged_state, open_loras
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.ranks import ALONE, Alone
from llama_adapter.runtime.schemes import FLOAT, Precision
from llama_adapter.runtime.schemes.state import quantise
from llama_adapter.vision.config import ChannelOrder


def stream_merged_bundle(
    directory: str | os.PathLike[str],
    lora: Sequence[str],
    *,
    dtype: Dtype | None = None,
    context: int | None = None,
    channel_order: ChannelOrder | None = None,
    cast_vision: bool = True,
    precision: Precision | None = None,
    ranks: Alone = ALONE,
) -> StreamedModel:
    """As `stream_bundle`, with LoRA folders merged, each FOLDER or FOLDER=WEIGHT; packed weights are unpacked.

    Raises CheckpointError also for weights of 8 or 4 bits, for a split bundle, and for a LoRA that does not fit.
    """
    place = Path(directory)
    manifest = read_manifest(place)
    if stored_precision(manifest) != FLOAT or num_ranks_of(manifest) > 1:
        kind = "is split over ranks" if num_ranks_of(manifest) > 1 else f"has {stored_precision(manifest)} weights"
        raise CheckpointError(
            f"The bundle `{place}` {kind}, so LoRA is not merged into it",
            hint="merge LoRA into the bundle of floats that it was made of (`llama-adapter convert --model BUNDLE "
            "--lora FOLDER --out MERGED`), then quantize, pack or split the result",
        )
    _, sizes = read_configs(place, manifest)
    loras = open_loras(
        lora, vocab_size=sizes.vocab_size, dim=sizes.dim, num_layers=sizes.num_layers, ffn_dim=sizes.ffn_dim
    )
    model, _ = stream_bundle(
        place,
        dtype=dtype,
        context=context,
        channel_order=channel_order,
        cast_vision=cast_vision,
        precision=precision,
    )
    config = model.decoder_config
    share = share_of(config, ranks)
    # Merged before they are converted, so that weights are rounded only once.
    tensors = merged_state(lambda: stream_bundle(place)[1], loras, config)
    if share is not config:
        tensors = take_all(tensors, whole=config, share=share)
    tensors = quantise(tensors, sketch(share), dtype=model.dtype, precision=model.precision)
    files = lora_files(loras)
    told = [model.digest, *((file.sha256, Path(file.path).name) for file in files), *(one.weight for one in loras)]
    return dataclasses.replace(
        model,
        digest=hashlib.sha256(repr(told).encode()).hexdigest(),
        sources=(*model.sources, *files),
        merged=(*model.merged, *(one.label for one in loras)),
        notes=(*model.notes, *lora_notes(loras, model.name)),
    ), tensors
