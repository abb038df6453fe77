"""Frozen weights: plain weights, which torch uses, and packed weights, which the C kernels use in both passes."""

# T tokens, O outputs, I inputs

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llama_adapter.runtime.devices.cpu_linear import NativeLinear, can_take
from llama_adapter.runtime.kernels.library import Library, find_library
from llama_adapter.runtime.operators import Linear

_BLOCK = 64  # outputs; the largest block of any instruction set


class PackedWeight:
    """A weight (O, I) that is packed twice: as it is for the forward pass, and transposed for the backward pass.

    The original tensor is not kept. A packed weight can be neither moved nor saved, and has no gradient.
    """

    def __init__(self, weight_OI: Tensor, *, library: Library) -> None:
        """The kernels must support the weight, see `fits`."""
        self.dtype, self.shape = weight_OI.dtype, weight_OI.shape
        self._ahead = NativeLinear(_layer(weight_OI), library=library)
        self._back = NativeLinear(_layer(weight_OI.T), library=library)

    def __len__(self) -> int:
        return self.shape[0]

    def times(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """x W^T + bias, (T, O). The bias is float32."""
        out_TO: Tensor = self._ahead(x_TI, bias_O)
        return out_TO

    def times_back(self, grad_TO: Tensor) -> Tensor:
        """grad W, (T, I)."""
        grad_TI: Tensor = self._back(grad_TO)
        return grad_TI


FrozenWeight = Tensor | PackedWeight


def times(x_TI: Tensor, weight: FrozenWeight, bias_O: Tensor | None = None) -> Tensor:
    """x W^T + bias, (T, O), without gradients. The bias has the type of the weight."""
    return F.linear(x_TI, weight, bias_O) if isinstance(weight, Tensor) else weight.times(x_TI, bias_O)


def times_back(grad_TO: Tensor, weight: FrozenWeight) -> Tensor:
    """grad W, (T, I), without gradients."""
    return grad_TO @ weight if isinstance(weight, Tensor) else weight.times_back(grad_TO)


def find_kernels(device_type: str, dtype: torch.dtype) -> Library | None:
    """The kernels if they multiply by frozen weights of this dtype faster than torch, in both passes; else None.

    In float32 they are faster, on all CPUs that have kernels. In bfloat16 torch is as fast, and needs half the memory.
    """
    return find_library().library if device_type == "cpu" and dtype == torch.float32 else None


def fits(shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether the kernels support a weight of this shape and its transpose."""
    return all(
        can_take(_layer(torch.empty(one, dtype=dtype, device="meta")), activations=dtype) for one in _ways(shape)
    )


def packed_bytes(shape: torch.Size, dtype: torch.dtype) -> int:
    """An upper limit of the bytes of a `PackedWeight`."""
    return sum(-(-outputs // _BLOCK) * _BLOCK * inputs for outputs, inputs in _ways(shape)) * dtype.itemsize


def _ways(shape: torch.Size) -> tuple[tuple[int, int], tuple[int, int]]:
    outputs, inputs = shape
    return (outputs, inputs), (inputs, outputs)


def _layer(weight_OI: Tensor) -> nn.Linear:
    outputs, inputs = weight_OI.shape
    layer = Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = nn.Parameter(weight_OI, requires_grad=False)
    return layer
