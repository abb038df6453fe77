"""What a spec names, from a bundle or from checkpoints: its weights, the sizes of its decoder, its questions."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_adapter.app.models.bundle import stream_bundle
from llama_adapter.app.models.bundle_manifest import read_manifest
from llama_adapter.app.models.bundle_tensors import TakePacked
from llama_adapter.app.models.checkpoints import (
    StoredQuestions,
    StreamedModel,
    declared_questions,
    declared_template,
    stream_sources,
    with_loras,
)
from llama_adapter.app.models.input_scales import insert_scales
from llama_adapter.app.models.models_by_name import bundle_folder
from llama_adapter.app.models.number_formats import Dtype
from llama_adapter.app.models.plan import PlanJob, planned_model
from llama_adapter.app.models.quantised_model import quantise_model
from llama_adapter.app.models.random_model import RandomLoader
from llama_adapter.app.models.sketch import sketch
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.conversation import Template
from llama_adapter.llm.exported.card import read_card
from llama_adapter.llm.split import share_of, shares_of, take_all
from llama_adapter.llm.weights.adapter import open_adapter
from llama_adapter.llm.weights.lora import merged_state, open_loras
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.ranks import ALONE, Alone
from llama_adapter.runtime.schemes import FLOAT
from llama_adapter.runtime.schemes.state import quantise
from llama_adapter.vision.card import EncoderCard


def stream_model(
    spec: CaptionerSpec,
    *,
    dtype: Dtype | None,
    encoder: EncoderCard | None = None,
    is_encoded_elsewhere: bool = False,
    take_packed: TakePacked | None = None,
    ranks: Alone = ALONE,
) -> StreamedModel:
    """The weights of `spec` on the CPU, in `dtype` and the precision of `spec`; the decoder's are read one by one.

    With None as `dtype`, weights are left as stored.
    With `ranks`, the decoder's tensors are this process's share. If pictures are encoded elsewhere, CLIP may be
    missing, and a bundle's encoder is left as stored; `encoder` is the card of the encoder in use, if it has one.
    Without `take_packed`, all weights are unpacked.
    """
    if spec.llama_dir is None:
        model, tensors = stream_merged_bundle(
            bundle_folder(spec.model),
            spec.lora,
            dtype=dtype,
            context=spec.context,
            channel_order=spec.channel_order,
            cast_vision=spec.vision_kind == "torch" and not is_encoded_elsewhere,
            precision=spec.precision,
            take_packed=take_packed,
            ranks=ranks,
        )
        return model, insert_scales(tensors, model.input_scales) if spec.operators == "w8a8" else tensors
    precision = spec.precision or FLOAT
    model, tensors = stream_sources(
        spec, dtype=dtype, precision=precision, exported=is_encoded_elsewhere, encoder=encoder, ranks=ranks
    )
    if precision != FLOAT:
        model, tensors = quantise_model(model, tensors, dtype=model.dtype, precision=precision)
    return model, tensors


def check_split(spec: CaptionerSpec, *, random: RandomLoader | None = None) -> None:
    """Raise UsageError if the decoder of `spec`, or a `random` one, cannot be divided over the ranks of `spec`.

    The check reads no weights, so that it can run before ranks are started. Raises CheckpointError for damaged files.
    """
    names = ("model", "llama_dir", "llama_type", "context", "lora")
    alone = CaptionerSpec(**{name: getattr(spec, name) for name in names})
    sizes = planned_model(PlanJob(spec=alone, size="" if random is None else random.name))
    shares_of(sizes.decoder, spec.tensor_parallel)


def stored_questions(spec: CaptionerSpec) -> StoredQuestions:
    """The questions that the model of a spec stores. Raises CheckpointError and GraphError.

    An exported decoder stores a prompt for captions only.
    """
    if spec.decoder is not None:
        return StoredQuestions(prompt=read_card(Path(spec.decoder)).prompt)
    if spec.llama_dir is None:
        manifest = read_manifest(bundle_folder(spec.model))
        return StoredQuestions(prompt=manifest["prompt"], question=manifest.get("question"))
    if spec.adapter is None:
        return StoredQuestions()
    return declared_questions(open_adapter(spec.adapter, for_texts=True))


def training_template(spec: CaptionerSpec) -> Template:
    """The template of prompts for a training that starts from the model of a spec. Raises CheckpointError."""
    if spec.prompt_template is not None:
        return spec.prompt_template
    if spec.llama_dir is None:
        template: Template = read_manifest(bundle_folder(spec.model)).get("template", "instruction")
        return template
    return "instruction" if spec.adapter is None else declared_template(open_adapter(spec.adapter, for_texts=True))


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
    manifest = read_manifest(directory)
    place = manifest.place
    if manifest.precision != FLOAT or manifest.num_ranks > 1:
        kind = "is split over ranks" if manifest.num_ranks > 1 else f"has {manifest.precision} weights"
        raise CheckpointError(
            f"The bundle `{place}` {kind}, so LoRA is not merged into it",
            hint="merge LoRA into the bundle of floats that it was made of (`llama-adapter convert --model BUNDLE "
            "--lora FOLDER --out MERGED`), then quantize, pack or split the result",
        )
    model, _ = stream_bundle(place, **options)
    config = model.decoder_config
    loras = open_loras(lora, config, contained=model.merged, name=str(place))
    share = share_of(config, ranks)
    # Merged before they are converted, so that weights are rounded only once.
    tensors = merged_state(lambda: stream_bundle(place)[1], loras, config)
    if share is not config:
        tensors = take_all(tensors, whole=config, share=share)
    tensors = quantise(tensors, sketch(share), dtype=model.dtype, precision=model.precision)
    return with_loras(model, loras, base=model.name), tensors
