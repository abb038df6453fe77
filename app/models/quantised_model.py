"""Quantisation of a float model: in memory, or from bundle to bundle (`quantize`)."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llama_adapter.app.models.bundle import (
    STORED_DTYPE,
    check_other_target,
    known_answer_of,
    load_bundle,
    require_space,
    save_bundle,
)
from llama_adapter.app.models.checkpoints import LoadedModel, Origin, StreamedModel, stream_sources
from llama_adapter.app.models.models_by_name import llama_settings
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.app.models.sketch import expected_forms, sketch
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.given import require_named, require_one_of
from llama_adapter.runtime.graphs.card import fingerprint
from llama_adapter.runtime.schemes import FLOAT, QUANTISED, Precision
from llama_adapter.runtime.schemes.scheme import find_scheme
from llama_adapter.runtime.schemes.state import new_finer_weights, quantise

# Takes a float model, and returns it quantised, in the form that `quantise_model` returns.
RoundWeights = Callable[[LoadedModel], StreamedModel]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantiseJob:
    """One run of `quantize`, as plain values."""

    model: str | None = None  # a bundle of floats, or a LLaMA without adapter; None: the embedded model
    out: str
    precision: Precision = QUANTISED[0]
    force: bool = False

    def __post_init__(self) -> None:
        require_one_of("precision", self.precision, QUANTISED)
        require_named(self, "model", "out", hint="name a folder")


def quantise_model(
    model: LoadedModel, tensors: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype, precision: Precision
) -> StreamedModel:
    """Quantise a model to `precision`; the decoder's float `tensors` are quantised one by one.

    Tensors that are not quantised are converted to `dtype`. Raises CheckpointError for a model that is quantised
    already, and for weights that are not finite.
    """
    require_float(model)
    encoder, decoder = sketch(model.vision_config), sketch(model.decoder_config)
    vision_tensors = quantise(model.vision_state.items(), encoder, dtype=dtype, precision=precision)
    quantised = dataclasses.replace(
        model,
        vision_state=dict(vision_tensors),
        decoder_state={},
        dtype=dtype,
        precision=precision,
        finer_weights=new_finer_weights(decoder, precision),
        origin=Origin(digest=model.digest, fingerprint=fingerprint(model.vision_state)),
    )
    return quantised, quantise(tensors, decoder, dtype=dtype, precision=precision)


def require_float(model: LoadedModel) -> None:
    """Raise CheckpointError for a model that is quantised already."""
    if model.precision != FLOAT:
        raise CheckpointError(
            f"The model {model.name} has {find_scheme(model.precision).title} weights already",
            hint="quantise the bundle that it was made from",
        )


def quantise_bundle(job: QuantiseJob, *, round_weights: RoundWeights | None = None) -> Path:
    """Write the quantised bundle of `job`, tensor by tensor; returns its folder.

    `round_weights` replaces rounding to nearest. The bundle keeps the known answer of the original. What is not rounded
    of a LLaMA gets `STORED_DTYPE`. Raises CheckpointError for a model that is damaged or quantised already, and if
    `out` may not be written or its disk has too little space.
    """
    source = Path(embedded_model() if job.model is None else job.model)
    target = Path(job.out)
    check_other_target(target, source, to="quantise", overwrite=job.force)
    if (llama := llama_settings(source)) is not None:
        model, tensors = stream_sources(CaptionerSpec(**llama), dtype=STORED_DTYPE, precision=job.precision)
    else:
        model = load_bundle(source)
        tensors = iter(model.decoder_state.items())
    if round_weights is None:
        quantised, tensors = quantise_model(model, tensors, dtype=model.dtype, precision=job.precision)
    else:
        require_float(model)
        halves = (model.vision_config, model.decoder_config)
        forms = [expected_forms(half, dtype=model.dtype, precision=job.precision) for half in halves]
        require_space(target, forms)  # checked before hours of rounding
        quantised, tensors = round_weights(model)
    return save_bundle(
        target,
        model=quantised,
        decoder_tensors=tensors,
        **known_answer_of(source),
        overwrite=job.force,
    )
