"""Encoder and decoder of a configuration, without weights: names, shapes and forms of their tensors."""

import dataclasses
import functools
from collections.abc import Mapping

import torch
from torch import nn

from llama_adapter.app.models.bundle_manifest import DAMAGED
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.kernels.layout import PackedLayout
from llama_adapter.runtime.schemes import FLOAT, Precision
from llama_adapter.runtime.schemes.packed import kind_of, packed_forms
from llama_adapter.runtime.schemes.scheme import TensorForm, dtype_name
from llama_adapter.runtime.schemes.state import linear_shapes, stored_forms
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.encoder import PictureEncoder

HalfConfig = VisionConfig | DecoderConfig


def sketch(config: HalfConfig) -> nn.Module:
    """The module of a configuration on the meta device. It is shared: do not change it.

    Raises CheckpointError for sizes beyond what torch can count.
    """
    # The rotary table would be computed for the whole context. It is not in the state dict, so one position is enough.
    return _sketch(config if isinstance(config, VisionConfig) else dataclasses.replace(config, context=1))


@functools.lru_cache(maxsize=8)  # loading a model calls it several times
def _sketch(config: HalfConfig) -> nn.Module:
    try:
        with torch.device("meta"):
            return PictureEncoder(config) if isinstance(config, VisionConfig) else LlamaAdapterDecoder(config)
    except (RuntimeError, TypeError, OverflowError):  # the last two: a dimension needs more than 64 bits
        raise CheckpointError("The configuration asks for tensors larger than any memory", hint=DAMAGED) from None


def expected_forms(
    config: HalfConfig,
    *,
    dtype: torch.dtype,
    precision: Precision = FLOAT,
    packed: PackedLayout | None = None,
    finer_weights: Mapping[str, Precision] | None = None,
) -> dict[str, TensorForm]:
    """Names and forms of the tensors of a configuration; with `packed`, linear weights are packed in this layout.

    `finer_weights` are those of `linear_precisions`. Raises the CheckpointError of `sketch`, and CheckpointError for
    packed weights in a dtype that no kernel has.
    """
    module = sketch(config)
    forms = stored_forms(module, dtype=dtype, precision=precision, finer_weights=finer_weights)
    if packed is None:
        return forms
    if kind_of(precision, dtype) is None:
        raise CheckpointError(f"Weights in {dtype_name(dtype)} cannot be packed", hint=DAMAGED)
    return packed_forms(forms, linear_shapes(module), layout=packed)
