"""Linear layers with 8-bit and 4-bit weights on NVIDIA GPUs, with operators of torch.

Limits and layouts follow torch's sources: aten/src/ATen/native/cuda/int8mm.cu, int4mm.cu and Blas.cpp.
"""

# R rows, K inputs, N outputs, G groups

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llama_adapter.runtime.schemes import OperatorChoice, Precision, int4, int8
from llama_adapter.runtime.schemes.layers import WEIGHT

_FEW_ROWS = 16  # one block of the 8-bit kernel, which uses no tensor cores; for more rows a plain product is faster
_LEAST_ROWS = 32  # `_int_mm` needs at least 17
_INNER_TILES = (8, 4, 2)  # numbers of tiles of 16 inputs that are adjacent in the 4-bit layout, the best first
_TILE = 16


def can_compute(
    precision: Precision, activations: torch.dtype, *, capability: tuple[int, int], wanted: OperatorChoice
) -> bool:
    """Whether a GPU of this compute capability has operators for these weights and activations."""
    if wanted == "aten":
        return False
    if precision == "int4":
        is_new = capability >= (8, 0) and torch.version.hip is None
        return is_new and activations == torch.bfloat16 and _has_kernel("_weight_int4pack_mm")
    if wanted == "w8a8":
        return capability >= (7, 5) and _has_kernel("_int_mm")
    return _has_kernel("_weight_int8pack_mm")


def _has_kernel(name: str) -> bool:
    """Whether this build of torch has the operator for CUDA."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"))


def build_linear(linear: nn.Linear, precision: Precision, *, wanted: OperatorChoice) -> nn.Module | None:
    """The layer that computes with these stored weights; None if no operator supports its sizes."""
    num_inputs, num_outputs = linear.in_features, linear.out_features
    if precision == "int4":
        fits = num_inputs % int4.GROUP == 0 and num_outputs % 8 == 0
        return Int4Linear(linear) if fits else None
    if wanted == "w8a8":
        return RoundedLinear(linear) if num_inputs % 8 == num_outputs % 8 == 0 else None
    return Int8Linear(linear)


class Int8Linear(nn.Module):
    """8-bit weights and float inputs: (..., K) to (..., N) in the type of the inputs."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", linear.weight.detach().contiguous())
        self.register_buffer("scale", getattr(linear, WEIGHT + int8.SCALE).float())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        rows_RK = x.reshape(-1, x.shape[-1]).contiguous()
        if len(rows_RK) <= _FEW_ROWS:
            out_RN = torch._weight_int8pack_mm(rows_RK, self.weight, self.scale)
        else:
            out_RN = rows_RK @ (self.weight.to(x.dtype) * self.scale.to(x.dtype)[:, None]).T
        return _finish(out_RN, self.bias, x)


class RoundedLinear(nn.Module):
    """8-bit weights, and inputs rounded to 8 bits with a scale for each row. The integer sums are exact."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", linear.weight.detach().contiguous())
        self.register_buffer("scale", getattr(linear, WEIGHT + int8.SCALE).float())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        values_RK, steps_R1 = int8.quantise_rows(x.reshape(-1, x.shape[-1]))
        num_rows = len(values_RK)
        padded = F.pad(values_RK, (0, 0, 0, max(_LEAST_ROWS - num_rows, 0)))
        sums_RN = torch._int_mm(padded, self.weight.T)[:num_rows]
        return _finish(sums_RN.float() * steps_R1 * self.scale, self.bias, x)


class Int4Linear(nn.Module):
    """4-bit weights and bfloat16 inputs. Scales are rounded to bfloat16, which loses three of their ten bits."""

    packed: Tensor
    scales_and_zeros: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        stored = linear.weight.detach()
        inner_tiles = next(tiles for tiles in _INNER_TILES if linear.in_features % (tiles * _TILE) == 0)
        # The operator expects the even input in the high half, and computes (code - 8) * scale + zero.
        swapped = (stored << 4) | (stored >> 4)
        self.register_buffer("packed", torch._convert_weight_to_int4pack(swapped, inner_tiles))
        scale_NG = getattr(linear, WEIGHT + int4.SCALE)
        scales_and_zeros = torch.zeros(*scale_NG.T.shape, 2, dtype=torch.bfloat16, device=scale_NG.device)
        scales_and_zeros[..., 0] = scale_NG.T
        self.register_buffer("scales_and_zeros", scales_and_zeros)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        rows_RK = x.reshape(-1, x.shape[-1]).contiguous()
        out_RN = torch._weight_int4pack_mm(rows_RK, self.packed, int4.GROUP, self.scales_and_zeros)
        return _finish(out_RN, self.bias, x)


def _finish(out_RN: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Add the bias, and convert to the type and the leading dimensions of the inputs."""
    out_RN = out_RN if bias is None else out_RN + bias
    return out_RN.to(x.dtype).view(*x.shape[:-1], -1)
