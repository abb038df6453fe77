"""From a model of floats to the same model with 8-bit weights: in memory, or from bundle to bundle (`quantize`)."""

import dataclasses
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from llama_adapter.app.models.bundle import KNOWN_ANSWER, check_target, load_bundle, save_bundle
from llama_adapter.app.models.checkpoints import LoadedModel, Origin
from llama_adapter.app.models.quantising import linear_weights, quantise
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.app.models.tensor_files import sketch
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.graphs.card import fingerprint
from llama_adapter.runtime.tensor_files.files import read_json


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantiseJob:
    """One `quantize`, as plain values."""

    model: str | None = None  # a bundle of floats; None: the embedded model
    out: str
    precision: Literal["int8"] = "int8"
    force: bool = False

    def __post_init__(self) -> None:
        if self.precision != "int8":
            raise ValueError(f"precision must be int8, got {self.precision!r}")
        for name in ("model", "out"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is empty: name a folder")


def quantise_model(
    model: LoadedModel, tensors: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype
) -> tuple[LoadedModel, Iterator[tuple[str, Tensor]]]:
    """The model with an empty `decoder_state`, and its decoder's tensors one by one, of those that `tensors` brings.

    All that does not become int8 is in `dtype`. Raises CheckpointError for a model of 8 bits, or numbers that are not
    finite.
    """
    if model.precision == "int8":
        raise CheckpointError(
            f"The model {model.name} has 8-bit weights already", hint="quantise the bundle that it was made from"
        )
    vision_linears, decoder_linears = (
        linear_weights(sketch(config)) for config in (model.vision_config, model.decoder_config)
    )
    quantised = dataclasses.replace(
        model,
        vision_state=dict(quantise(model.vision_state.items(), linears=vision_linears, dtype=dtype)),
        decoder_state={},
        dtype=dtype,
        precision="int8",
        origin=Origin(digest=model.digest, fingerprint=fingerprint(model.vision_state)),
    )
    return quantised, quantise(tensors, linears=decoder_linears, dtype=dtype)


def quantise_bundle(job: QuantiseJob) -> Path:
    """Write the bundle of `job` with 8-bit weights, tensor by tensor; returns its folder.

    Its known answer is the one of the model it is made from. Raises CheckpointError for a bundle that is damaged or of
    8 bits already, and where `out` may not be written.
    """
    source = Path(embedded_model() if job.model is None else job.model)
    target = Path(job.out)
    if target.resolve() == source.resolve():
        raise CheckpointError(f"`{target}` is the bundle to quantise itself", hint="write to another place")
    check_target(target, overwrite=job.force)
    model = load_bundle(source)
    quantised, tensors = quantise_model(model, model.decoder_state.items(), dtype=model.dtype)
    known = read_json(source / KNOWN_ANSWER) if (source / KNOWN_ANSWER).is_file() else None
    return save_bundle(
        target,
        model=quantised,
        decoder_tensors=tensors,
        known_answer=known,
        known_picture=None if known is None else source / os.path.basename(str(known.get("picture"))),
        overwrite=job.force,
    )
