"""The models that the engine is measured with: the embedded one, and a larger decoder behind an encoder of its size."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from llama_adapter.app.captioning.assemble import ModelLoader, Parts, assemble_parts
from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.app.models.random_model import LLAMA_SIZES, random_model
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.app.models.spec import CaptionerSpec

ModelName = Literal["embedded", "tiny", "160M", "1B"]  # all but the first with random weights


@contextmanager
def opened(name: ModelName, *, dtype: str, device: str, num_slots: int) -> Iterator[Parts]:
    """The parts of a model, with `num_slots` rows."""
    spec = CaptionerSpec(device=device, dtype=dtype, batch_size=num_slots)
    parts = assemble_parts(spec, load=None if name == "embedded" else _loader(name))
    try:
        yield parts
    finally:
        parts.vision.close()


def _loader(name: str) -> ModelLoader:
    """The encoder is of the embedded one's size, so that a job is about the decoder; its weights are random too."""

    def load(dtype: torch.dtype) -> LoadedModel:
        small = load_bundle(embedded_model(), dtype=dtype).vision_config
        query = dataclasses.replace(small.query, output_dim=LLAMA_SIZES[name].dim)
        return random_model(name, dtype=dtype, vision=dataclasses.replace(small, query=query))

    return load
