"""The torch encoders of `encode`: a model's picture encoder alone, or a whole model that projects keys and values."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from llama_adapter.app.captioning.assemble import assemble_parts
from llama_adapter.app.jobs.picture_encoders import OpenEncoder, completed, encoder_digest
from llama_adapter.app.models.checkpoints import read_encoder, require_encoder
from llama_adapter.app.models.memory_fit import place_encoder
from llama_adapter.app.models.number_formats import (
    DtypeChoice,
    ModelSizes,
    best_dtype,
    check_asked_precision,
    check_rounding,
    widening_note,
)
from llama_adapter.app.models.sketch import sketch
from llama_adapter.app.models.spec import AUTO, CaptionerSpec, EncoderSources
from llama_adapter.app.models.stream_model import stream_model
from llama_adapter.app.pictures.prefixes.file import Encoding
from llama_adapter.runtime.devices import EAGER, open_backend, resolve_dtype
from llama_adapter.runtime.graphs.card import fingerprint
from llama_adapter.runtime.schemes import FLOAT, Precision
from llama_adapter.runtime.schemes.scheme import dtype_name
from llama_adapter.runtime.schemes.state import convert_precision
from llama_adapter.runtime.user_cache import cache_note


def open_model(spec: CaptionerSpec, how: Mapping[str, Any]) -> tuple[CaptionerSpec, OpenEncoder]:
    """Load the whole model, which also projects keys and values."""
    parts = assemble_parts(spec)
    parts.info.require_sight()
    encoding = Encoding(
        name=parts.info.name,
        digest=parts.info.digest,
        vision=parts.model.vision_config,
        fingerprint={},  # the digest identifies the whole model
        # float32 represents the outputs of both an exported encoder and the decoder exactly.
        dtype=parts.info.dtype if parts.info.encoder is None else "float32",
        precision=parts.info.precision,
        encoder=parts.info.encoder,
        **how,
    )
    encoder = OpenEncoder(
        encoding=encoding, vision=parts.vision, device=parts.info.device, runner=parts.runner, notes=parts.info.notes
    )
    return parts.spec, encoder


def open_weights(
    spec: CaptionerSpec, sources: EncoderSources, how: Mapping[str, Any]
) -> tuple[CaptionerSpec, OpenEncoder]:
    """Load the picture encoder of a bundle, or of an adapter with its CLIP. The language model is not read."""
    backend = open_backend(spec.device)
    check_asked_precision(spec, backend=backend)
    precision: Precision = FLOAT
    origin, digest = None, ""
    if sources.adapter is not None:
        name, config, state = read_encoder(sources)
        num_weights = sum(tensor.numel() for tensor in state.values())
        dtype = resolve_dtype(spec.dtype, backend=backend) if spec.dtype != AUTO else best_dtype(num_weights, backend)
    else:
        model, _ = stream_model(sources.whole, dtype=None)  # the decoder is not read
        require_encoder(model)
        name, config, state, digest = model.name, model.vision_config, model.vision_state, model.digest
        precision, origin = model.precision, model.origin
        num_weights = sum(tensor.numel() for tensor in state.values())
        sizes = ModelSizes(
            decoder=model.decoder_config,
            num_encoder_weights=num_weights,
            precision=precision,
            finer_weights=model.finer_weights,
        )
        dtype = DtypeChoice(spec, backend=backend, mode=EAGER)(sizes)
    check_rounding(spec, precision)
    halves = fingerprint(state) if origin is None else dict(origin.fingerprint)
    state = convert_precision(dict(state), sketch(config), dtype=dtype, wanted=precision)
    assert isinstance(spec.batch_size, int), "`auto` was replaced"
    vision = place_encoder(config, state, num_rows=spec.batch_size, operators=spec.operators, backend=backend)
    encoding = Encoding(
        name=name,
        digest=digest or encoder_digest(config, halves),
        vision=config,
        fingerprint=halves,
        dtype=dtype_name(dtype),
        precision=precision,
        encoder=None,
        **how,
    )
    notes = widening_note(precision, dtype, operators=spec.operators, backend=backend), cache_note()
    spec = completed(spec, encoding, device=str(backend.device))
    return dataclasses.replace(spec, precision=precision), OpenEncoder(
        encoding=encoding, vision=vision, device=backend.name, notes=tuple(filter(None, notes))
    )
