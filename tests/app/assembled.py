"""Models with all tensors of their checkpoints."""

import dataclasses

import torch

from llama_adapter.app.models.checkpoints import LoadedModel, stream_sources
from llama_adapter.app.models.spec import CaptionerSpec


def assemble_sources(sources: CaptionerSpec) -> LoadedModel:
    """The model of `sources` with its state dicts in float32."""
    model, tensors = stream_sources(sources, dtype=torch.float32)
    return dataclasses.replace(model, decoder_state=dict(tensors))
