"""The halves of a model that configurations describe, without weights: names, shapes and forms of their tensors."""

import dataclasses

import torch
from torch import nn

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.schemes import FLOAT, Precision
from llama_adapter.runtime.schemes.scheme import TensorForm
from llama_adapter.runtime.schemes.state import stored_forms
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.encoder import PictureEncoder

HalfConfig = VisionConfig | DecoderConfig

DAMAGED = "the bundle is damaged or was changed by hand; write it again with `llama-adapter convert`"


def sketch(config: HalfConfig) -> nn.Module:
    """The module of a configuration on the meta device.

    Raises CheckpointError for sizes beyond what torch can count.
    """
    try:
        with torch.device("meta"):
            if isinstance(config, VisionConfig):
                return PictureEncoder(config)
            # The rotary table has real values and the length of the context, and is not in the state dict.
            return LlamaAdapterDecoder(dataclasses.replace(config, context=1))
    except (RuntimeError, TypeError):  # TypeError for a side beyond 64 bits
        raise CheckpointError("The configuration asks for tensors larger than any memory", hint=DAMAGED) from None


def expected_forms(config: HalfConfig, *, dtype: torch.dtype, precision: Precision = FLOAT) -> dict[str, TensorForm]:
    """Names and forms of the tensors of a configuration. Raises CheckpointError as `sketch`."""
    return stored_forms(sketch(config), dtype=dtype, precision=precision)


def num_layers(config: HalfConfig) -> int:
    """Number of transformer layers of a half. Each has several tensors."""
    if isinstance(config, VisionConfig):
        return config.clip.num_layers + config.query.depth
    return config.num_layers
