"""8-bit weights: passes over the tensors of a model, one after the other, before any module is made of them.

W ~ weight * weight_scale[:, None]: the weights of all linear layers become int8 in -127..127, each output channel with
its own float32 scale. What computes with them is the backend's matter (`Backend.prepare`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from llama_adapter.app.models.spec import Precision
from llama_adapter.runtime.errors import CheckpointError

SCALE = "_scale"  # `head.weight` has its scales in `head.weight_scale`
LARGEST = 127
_NUMBERS_AT_ONCE = 1 << 18  # as float32 they stay in the cache


def linear_weights(module: nn.Module) -> frozenset[str]:
    """Names of the weights that become int8: those of all linear layers, and no embedding, convolution or norm."""
    return frozenset(f"{name}.weight" for name, child in module.named_modules() if isinstance(child, nn.Linear))


def is_scale(name: str) -> bool:
    """Whether a tensor holds the scales of an int8 weight."""
    return name.endswith(".weight" + SCALE)


def quantise(
    tensors: Iterable[tuple[str, Tensor]], *, linears: Collection[str], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Float tensors with those named in `linears` as int8, each followed by its scales; the others in `dtype`.

    Raises CheckpointError for a weight that is not finite.
    """
    for name, tensor in tensors:
        if name in linears:
            weight, scale = quantise_weight(tensor, name=name)
            yield name, weight
            yield name + SCALE, scale
        else:
            yield name, tensor.to(dtype)


def dequantise(tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The tensors without scales, all of them in `dtype`: int8 weights times their scales."""
    for name, tensor in tensors.items():
        if name + SCALE in tensors:
            yield name, (tensor.float() * tensors[name + SCALE][:, None]).to(dtype)
        elif not is_scale(name):
            yield name, tensor.to(dtype)


def cast(tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The tensors in `dtype`, but int8 weights and their scales as they are."""
    for name, tensor in tensors.items():
        yield name, tensor if tensor.dtype == torch.int8 or is_scale(name) else tensor.to(dtype)


def convert_precision(
    tensors: Mapping[str, Tensor], module: nn.Module, *, dtype: torch.dtype, wanted: Precision
) -> dict[str, Tensor]:
    """The state dict of `module` with its weights in the precision `wanted` and all else in `dtype`; what is so
    already is shared, not copied. Raises CheckpointError as `quantise`."""
    is_int8 = any(is_scale(name) for name in tensors)
    if is_int8 == (wanted == "int8"):
        return dict(cast(tensors, dtype=dtype))
    if is_int8:
        return dict(dequantise(tensors, dtype=dtype))
    return dict(quantise(tensors.items(), linears=linear_weights(module), dtype=dtype))


def quantise_weight(weight: Tensor, *, name: str = "weight") -> tuple[Tensor, Tensor]:
    """Weight (out, in) of any float type -> int8 (out, in) and float32 scales (out,), the largest number of a row over
    127; the scale of a row of zeros is 1. Raises CheckpointError, naming it, for a weight that is not finite."""
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight))
    num_rows = max(_NUMBERS_AT_ONCE // weight.shape[1], 1)
    for start in range(0, len(weight), num_rows):
        part = slice(start, start + num_rows)
        numbers = weight[part].float()
        largest = numbers.abs().amax(dim=1)
        if not bool(largest.isfinite().all()):
            raise CheckpointError(
                f"`{name}` has numbers that are infinite or none at all, which 8 bits cannot hold",
                hint="the file is damaged, or its training had diverged; `llama-adapter doctor` looks at all of them",
            )
        scales[part] = torch.where(largest > 0, largest / LARGEST, 1.0)
        values[part] = (numbers / scales[part, None]).round_().clamp_(-LARGEST, LARGEST)
    return values, scales
