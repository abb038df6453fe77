"""The row-wise operations of training with the C kernels: RMS norm and SwiGLU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from llama_adapter.runtime.kernels.library import KINDS, Library, find_library
from llama_adapter.runtime.kernels.threads import num_threads

_TYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class RowKernels:
    """Methods run forward if `grad` is None, else backward. Tensors must be contiguous and have the same dtype."""

    library: Library

    def swiglu(self, gate_up: Tensor, grad: Tensor | None) -> Tensor:
        """(..., 2 F) -> (..., F): silu of the first half times the second. Backward: the gradient of `gate_up`."""
        width = gate_up.shape[-1] // 2
        out = torch.empty_like(gate_up) if grad is not None else gate_up.new_empty(*gate_up.shape[:-1], width)
        count = gate_up.shape[:-1].numel()
        kind, addresses = KINDS[gate_up.dtype], (gate_up.data_ptr(), _address(grad), out.data_ptr())
        self.library.swiglu(kind, count, width, *addresses, num_threads())
        return out

    def rms_norm(self, x: Tensor, grad: Tensor | None, weight: Tensor, inverse: Tensor, eps: float) -> Tensor:
        """(..., D) -> (..., D): the norm. Backward: the gradient of x.

        `inverse`, float32 (..., 1), is written by the forward pass and read by the backward pass.
        """
        out, weight = torch.empty_like(x), weight.detach().float().contiguous()
        addresses = (x.data_ptr(), _address(grad), weight.data_ptr(), inverse.data_ptr(), out.data_ptr())
        count = inverse.numel()
        self.library.rms_norm(KINDS[x.dtype], count, x.shape[-1], eps, *addresses, num_threads())
        return out


def row_kernels(x: Tensor) -> RowKernels | None:
    """The kernels if they support the type and the device of `x`, else None."""
    library = find_library().library if x.is_cpu and x.dtype in _TYPES else None
    return None if library is None else RowKernels(library)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
