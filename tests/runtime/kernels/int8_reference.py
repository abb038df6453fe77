"""What a linear layer with 8-bit weights computes, in plain torch and slowly: the yardstick for kernels.

Activations are rounded per row and per group of 128 input features, products and their sums within a group are exact
whole numbers, and groups are added in float32.
"""

# R rows, G groups of input features, K features in a group, O output features

import torch
from torch import Tensor

GROUP = 128
LARGEST = 127


def quantise_rows(x_RF: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Rows of any float type -> for each group whole numbers in -127..127 (R, K), and scales (R, 1), both float32."""
    numbers, scales = [], []
    for group_RK in x_RF.float().split(GROUP, dim=1):
        largest = group_RK.abs().amax(dim=1, keepdim=True)
        scales.append(largest / LARGEST)
        # One division: a whole number over a tensor would be its reciprocal times the number, with another rounding.
        inverse = torch.where(largest > 0, torch.full_like(largest, LARGEST) / largest, 0.0)
        numbers.append((group_RK * inverse).round().clamp(-LARGEST, LARGEST))
    return numbers, scales


def int8_linear(x: Tensor, weight_OF: Tensor, weight_scale_O: Tensor, bias_O: Tensor | None) -> Tensor:
    """(..., F) -> (..., O) in the type of `x`, by weights int8 (O, F) with float32 scales (O,)."""
    x_RF = x.reshape(-1, x.shape[-1])
    sums_RO = torch.zeros(len(x_RF), len(weight_OF))
    for numbers_RK, scale_R1, weight_OK in zip(*quantise_rows(x_RF), weight_OF.split(GROUP, dim=1), strict=True):
        # Sums of 128 products of up to 127 * 127 are below 2^24, so float32 holds them exactly.
        sums_RO += (numbers_RK @ weight_OK.float().T) * scale_R1
    out_RO = sums_RO * weight_scale_O
    if bias_O is not None:
        out_RO = out_RO + bias_O.float()
    return out_RO.to(x.dtype).view(*x.shape[:-1], len(weight_OF))
