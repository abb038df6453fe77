"""Scales of the inputs of calibrated 8-bit layers: a file of a bundle, and their way into a model's layers.

Operators w8a8 round all inputs of a layer with its scale, a float32 tensor (1,), and larger inputs saturate. Other
operators do not use it, so it is not part of a state dict until `with_scales` inserts it.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from llama_adapter.app.models.checkpoints import StreamedModel
from llama_adapter.app.models.sketch import HalfConfig, sketch
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.schemes.files import TensorWriter, check_tensors
from llama_adapter.runtime.schemes.int8 import INPUT_SCALE
from llama_adapter.runtime.schemes.packed import PACKED
from llama_adapter.runtime.schemes.scheme import TensorForm
from llama_adapter.runtime.schemes.state import linear_weights
from llama_adapter.runtime.tensor_files.files import list_keys, read_safetensors

ENCODER, DECODER = "vision.", "llm."  # before the names of weights


def take_scales(parts: Mapping[str, dict[str, Tensor]], half: str) -> dict[str, Tensor]:
    """Remove the scales from the stored tensors of a half's weights; empty if they have none."""
    return {half + name: one.pop(INPUT_SCALE) for name, one in parts.items() if INPUT_SCALE in one}


def write_scales(path: Path, scales: Mapping[str, Tensor], encoder: HalfConfig, decoder: HalfConfig) -> None:
    """Write the scales of a model as safetensors. Raises ValueError unless they are those of all linear layers."""
    with TensorWriter(path, forms=_forms(encoder, decoder)) as file:
        for name, scale in scales.items():
            file.write(name, scale)


def read_scales(path: Path, encoder: HalfConfig, decoder: HalfConfig, *, hint: str) -> dict[str, Tensor]:
    """Read a file of `write_scales`.

    Raises CheckpointError if it is damaged, for other layers, or has scales that are not finite numbers above 0.
    """
    scales = read_safetensors(path)
    check_tensors(scales, forms=_forms(encoder, decoder), path=path, hint=hint)
    if broken := [name for name, scale in scales.items() if not 0 < float(scale) < torch.inf]:
        raise CheckpointError(
            f"`{path}` has scales that are not finite numbers above 0, in {list_keys(broken)}", hint=hint
        )
    return scales


def _forms(encoder: HalfConfig, decoder: HalfConfig) -> dict[str, TensorForm]:
    halves = ((ENCODER, encoder), (DECODER, decoder))
    names = [half + name for half, config in halves for name in sorted(linear_weights(sketch(config)))]
    return dict.fromkeys(names, TensorForm((1,), torch.float32))


def with_scales(streamed: StreamedModel) -> StreamedModel:
    """The model with its scales in the state dicts of both halves."""
    model, tensors = streamed
    vision = dict(insert_scales(model.vision_state.items(), model.input_scales, ENCODER))
    return dataclasses.replace(model, vision_state=vision), insert_scales(tensors, model.input_scales, DECODER)


def insert_scales(
    tensors: Iterable[tuple[str, Tensor]], scales: Mapping[str, Tensor], half: str
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a half, with the scale of each layer before its plain or packed weight."""
    for name, tensor in tensors:
        weight = name.partition(PACKED)[0]
        if (scale := scales.get(half + weight)) is not None:
            yield weight + INPUT_SCALE, scale
        kept = [tensor]
        del tensor
        yield name, kept.pop()
