"""Scales of the inputs of calibrated 8-bit layers: a file of a bundle, and their way into the decoder's layers.

Operators w8a8 round all inputs of a layer with its scale, a float32 tensor (1,), and larger inputs saturate. Other
operators do not use it, so it is not part of a state dict until `insert_scales` adds it. Only the decoder has scales:
the inputs of an encoder's layers differ too much from each other (docs/fewer-bits.md has the errors).
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from llama_adapter.app.models.bundle_manifest import DAMAGED
from llama_adapter.app.models.sketch import sketch
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.schemes.files import TensorWriter, check_tensors
from llama_adapter.runtime.schemes.int8 import INPUT_SCALE
from llama_adapter.runtime.schemes.packed import PACKED
from llama_adapter.runtime.schemes.scheme import TensorForm
from llama_adapter.runtime.schemes.state import linear_weights
from llama_adapter.runtime.tensor_files.arrays import list_keys
from llama_adapter.runtime.tensor_files.files import read_safetensors


def write_scales(path: Path, scales: Mapping[str, Tensor], decoder: DecoderConfig) -> None:
    """Write scales, by the names of weights, as safetensors.

    Raises ValueError unless they are those of all linear layers of the decoder.
    """
    with TensorWriter(path, forms=_forms(decoder)) as file:
        for name, scale in scales.items():
            file.write(name, scale)


def read_scales(path: Path, decoder: DecoderConfig) -> dict[str, Tensor]:
    """Read a file of `write_scales`.

    Raises CheckpointError if it is damaged, for other layers, or has scales that are not finite numbers above 0.
    """
    scales = read_safetensors(path)
    check_tensors(scales, forms=_forms(decoder), path=path, hint=DAMAGED)
    if broken := [name for name, scale in scales.items() if not 0 < float(scale) < torch.inf]:
        raise CheckpointError(
            f"`{path}` has scales that are not finite numbers above 0, in {list_keys(broken)}", hint=DAMAGED
        )
    return scales


def _forms(decoder: DecoderConfig) -> dict[str, TensorForm]:
    return dict.fromkeys(sorted(linear_weights(sketch(decoder))), TensorForm((1,), torch.float32))


def insert_scales(tensors: Iterable[tuple[str, Tensor]], scales: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a decoder, with the scale of each layer before its plain or packed weight."""
    for name, tensor in tensors:
        weight = name.partition(PACKED)[0]
        if weight in scales:
            yield weight + INPUT_SCALE, scales[weight]
        kept = [tensor]
        del tensor
        yield name, kept.pop()
