"""Slow reference for linear layers with 8-bit and 4-bit weights, in plain torch; the kernels are compared with it.

Activations are rounded per row. Four groups of input features share a scale, and each group is rounded with that scale
halved as often as its largest activation allows. Products and their sums within a group are exact integers. Groups
are added in float32.
"""

# R rows, G groups of input features, K features in a group, F input features, O output features

import torch
from torch import Tensor

from llama_adapter.runtime.schemes.int4 import unpacked

GROUP = 32
SHARING = 4  # groups of activations that share a scale
LARGEST = 127
MIDDLE = 8  # the code of 0 in 4-bit weights


def quantise_rows(x_RF: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Rows of any float type -> for each group, integers in -127..127 (R, K) and scales (R, 1), both as float32.

    Scales of groups that share one differ by powers of two.
    """
    numbers, scales = [], []
    for wide_RW in x_RF.float().split(SHARING * GROUP, dim=1):
        widest = wide_RW.abs().amax(dim=1, keepdim=True)
        for group_RK in wide_RW.split(GROUP, dim=1):
            largest = group_RK.abs().amax(dim=1, keepdim=True)
            part = torch.ones_like(widest)
            while (fits := (largest <= widest * part / 2) & (part > 2.0**-30)).any():
                part = torch.where(fits, part / 2, part)
            scales.append(widest / LARGEST * part)
            # Divide two tensors: a Python number divided by a tensor is computed as its reciprocal times the number,
            # which rounds differently.
            inverse = torch.where(widest > 0, torch.full_like(widest, LARGEST) / widest / part, 0.0)
            numbers.append((group_RK * inverse).round().clamp(-LARGEST, LARGEST))
    return numbers, scales


def int8_linear(x: Tensor, weight_OF: Tensor, weight_scale_O: Tensor, bias_O: Tensor | None) -> Tensor:
    """(..., F) -> (..., O) in the dtype of `x`, with int8 weights (O, F) and float32 scales (O,)."""
    x_RF = x.reshape(-1, x.shape[-1])
    sums_RO = torch.zeros(len(x_RF), len(weight_OF))
    groups = zip(*quantise_rows(x_RF), weight_OF.split(GROUP, dim=1), strict=True)
    for numbers_RK, scale_R1, weight_OK in groups:
        # Sums of 32 products of up to 127 * 127 are below 2^24, so float32 holds them exactly.
        sums_RO += (numbers_RK @ weight_OK.float().T) * scale_R1
    return _finished(sums_RO * weight_scale_O, bias_O, x)


def int4_linear(x: Tensor, stored: Tensor, weight_scale_OG: Tensor, bias_O: Tensor | None) -> Tensor:
    """(..., F) -> (..., O) in the dtype of `x`, with stored weights and scales of the scheme int4."""
    x_RF = x.reshape(-1, x.shape[-1])
    codes_OF = unpacked(stored).float() - MIDDLE
    sums_RO = torch.zeros(len(x_RF), len(codes_OF))
    groups = zip(*quantise_rows(x_RF), codes_OF.split(GROUP, dim=1), weight_scale_OG.float().unbind(dim=1), strict=True)
    for numbers_RK, scale_R1, codes_OK, weight_scale_O in groups:
        sums_RO += (numbers_RK @ codes_OK.T) * (scale_R1 * weight_scale_O)
    return _finished(sums_RO, bias_O, x)


def _finished(out_RO: Tensor, bias_O: Tensor | None, x: Tensor) -> Tensor:
    if bias_O is not None:
        out_RO = out_RO + bias_O.float()
    return out_RO.to(x.dtype).view(*x.shape[:-1], out_RO.shape[1])
