"""4-bit weights: 32 inputs of an output share a scale, W = (code - 8) * scale, with codes 0..15. 4.5 bits per weight.

A byte stores two codes, the even input in the low half: uint8 (out, in / 2). Scales are float16 (out, in / 32, rounded
up). The layout is that of `MatMulNBits` in onnxruntime.

The C kernels round many times faster than torch, to the same codes and scales. Without kernels, and on accelerators,
torch rounds.
"""

# O outputs, I inputs, G groups of an output, E inputs of a group, P pairs of them

from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_adapter.runtime.kernels.arrays import GROUP as GROUP
from llama_adapter.runtime.kernels.library import Library, find_library
from llama_adapter.runtime.schemes.arrays import round_int4
from llama_adapter.runtime.schemes.gptq import round_columns
from llama_adapter.runtime.schemes.scheme import Parts, Scheme, TensorForm, rows_at_once

SCALE = "_scale"
MIDDLE = 8
_LEVELS = (-MIDDLE, MIDDLE - 1)
_LARGEST = 65504  # of float16
# Times the scale that gives the largest weight the level -8: that, one that clips it, and one that gives it level 7.
_FACTORS = (1.0, 0.9, -MIDDLE / (MIDDLE - 1))
_NUMBERS_FOR_KERNELS = 1 << 22  # that are rounded in one call


def quantise_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weight (out, in) of any float type -> bytes of two codes (out, groups, 16) and float16 scales (out, groups).

    In the first of three scales that are tried, the weight of largest magnitude in a group gets the code 0, level -8,
    because the largest level is only 7. That scale is therefore negative if this weight is positive. Of the three, the
    one with the least error is chosen, and then changed to the best scale for its codes by least squares. Squared
    errors count 1 + 2 (w / largest w)^2 times, because the largest weights often belong to outliers among the inputs.
    The last group of a row is padded with zeros. Raises ValueError for a weight that is not finite or too large for a
    scale in float16. The results are on the device of the weight.
    """
    num_outputs, num_inputs = weight.shape
    num_groups = -(-num_inputs // GROUP)
    codes_OGP = torch.empty(num_outputs, num_groups, GROUP // 2, dtype=torch.uint8, device=weight.device)
    scales_OG = torch.empty(num_outputs, num_groups, dtype=torch.float16, device=weight.device)
    kernels = find_library().library if weight.is_cpu else None
    num_rows = rows_at_once(weight) if kernels is None else rows_at_once(weight, numbers=_NUMBERS_FOR_KERNELS)
    for start in range(0, num_outputs, num_rows):
        part = slice(start, start + num_rows)
        rows_OI = weight[part]
        rounded = _round(rows_OI) if kernels is None else _round_by_kernels(rows_OI, kernels)
        codes_OGP[part], scales_OG[part] = rounded
    return codes_OGP, scales_OG


def _round_by_kernels(weight_OI: Tensor, kernels: Library) -> tuple[Tensor, Tensor]:
    numbers_OI = (weight_OI if weight_OI.dtype == torch.bfloat16 else weight_OI.float()).detach()
    bits_OI = (numbers_OI.view(torch.uint16) if numbers_OI.dtype == torch.bfloat16 else numbers_OI).numpy()
    codes_OGP, scales_OG = map(torch.from_numpy, round_int4(bits_OI, library=kernels))
    return codes_OGP, scales_OG


def _round(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    return _round_groups(_in_groups(weight_OI.float()))


def _in_groups(weight_OI: Tensor) -> Tensor:
    """(O, I) -> (O, G, E), the last group padded with zeros."""
    num_outputs, num_inputs = weight_OI.shape
    missing = -num_inputs % GROUP
    return (pad(weight_OI, (0, missing)) if missing else weight_OI).reshape(num_outputs, -1, GROUP)


def _round_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Groups of weights float32 (..., E) -> codes (..., P) and scales float32 (...), as in `quantise_groups`."""
    if not bool(weight.isfinite().all()):
        raise ValueError("a number is infinite or NaN")
    costs = (weight / _storable(_widest(weight))).square_().add_(MIDDLE**2 / 2)
    steps = _choose_scales(weight, costs)
    return _in_pairs(_codes(_levels(weight, steps))), steps[..., 0]


def _choose_scales(weight: Tensor, costs: Tensor) -> Tensor:
    """Groups of weights (..., I) -> scales (..., 1) as in `quantise_groups`, with errors that count `costs` times.

    The costs are (I,) or (..., I). Scales are float32 numbers that are exact in float16. Raises ValueError for weights
    that are too large for such a scale.
    """
    widest = _widest(weight)
    if not bool(widest.half().isfinite().all()):
        raise ValueError("a number is too large for a scale in float16")
    tried = [_storable(widest * factor) for factor in _FACTORS]
    errors = [_sum(_levels(weight, steps).mul_(steps).sub_(weight).square_().mul_(costs)) for steps in tried]
    best_steps = torch.cat(tried, -1).gather(-1, torch.cat(errors, -1).argmin(-1, keepdim=True))
    levels = _levels(weight, best_steps)
    counted = costs * levels
    squares = _sum(levels * counted)
    return torch.where(squares > 0, _storable(_sum(counted * weight) / squares), best_steps)


def _widest(weight: Tensor) -> Tensor:
    """Scales float32 (..., 1) that give the largest weight of each group the level -8."""
    return weight.gather(-1, weight.abs().argmax(-1, keepdim=True)) / -MIDDLE


def _levels(weight: Tensor, steps: Tensor) -> Tensor:
    return (weight / steps).round_().clamp_(*_LEVELS)


def _storable(steps: Tensor) -> Tensor:
    """Scales float32, rounded to finite numbers of float16, with 1 in place of 0."""
    steps = steps.half().float().clamp_(-_LARGEST, _LARGEST)
    return torch.where(steps == 0, torch.ones_like(steps), steps)


def _sum(errors: Tensor) -> Tensor:
    """The sum of the last dimension, (..., 1), added in one order on all processors: that of `arrays.round_int4`."""
    eights = torch.split(pad(errors, (0, -errors.shape[-1] % 8)), 8, dim=-1)
    total: Tensor = reduce(torch.add, torch.split(reduce(torch.add, eights), 1, dim=-1))
    return total


def _quantise(weight: Tensor) -> Parts:
    _require_even(weight.shape[1])
    codes, scales = quantise_groups(weight)
    return {"": codes.flatten(1)[:, : weight.shape[1] // 2].contiguous(), SCALE: scales}


def _observe(hessian: Tensor | None, x: Tensor) -> Tensor:
    return (torch.zeros(x.shape[1], x.shape[1]) if hessian is None else hessian).addmm_(x.T, x)


def _calibrate(weight: Tensor, hessian: Tensor) -> Parts:
    _require_even(weight.shape[1])
    levels, scales = round_columns(weight, hessian, group=GROUP, choose_scales=_choose_scales, levels=_LEVELS)
    return {"": _in_pairs(_codes(levels)), SCALE: scales.half()}


def _require_even(num_inputs: int) -> None:
    if num_inputs % 2:
        raise ValueError(f"its number of inputs, {num_inputs}, is odd")


def _codes(levels: Tensor) -> Tensor:
    return (levels + MIDDLE).to(torch.uint8)


def _in_pairs(codes: Tensor) -> Tensor:
    """Codes (..., in) -> bytes (..., in / 2)."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpacked(stored: Tensor) -> Tensor:
    """Stored weight uint8 (out, in / 2) -> codes uint8 (out, in)."""
    return torch.stack([stored & 15, stored >> 4], dim=-1).flatten(1)


def _dequantise(parts: Parts) -> Tensor:
    codes = unpacked(parts[""])
    steps = parts[SCALE].float().repeat_interleave(GROUP, dim=1)[:, : codes.shape[1]]
    return (codes.float() - MIDDLE).mul_(steps)


def _fault(suffix: str, tensor: Tensor) -> str:
    is_sound = suffix != SCALE or bool((tensor.isfinite() & (tensor != 0)).all())
    return "" if is_sound else "scales that are 0 or not finite"


SCHEME = Scheme(
    name="int4",
    title="4-bit",
    weight_dtype=torch.uint8,
    weights_per_item=2,
    suffixes=("", SCALE),
    forms=lambda shape, dtype: {
        "": TensorForm((shape[0], shape[1] // 2), torch.uint8),
        SCALE: TensorForm((shape[0], -(-shape[1] // GROUP)), torch.float16),
    },
    quantise=_quantise,
    observe=_observe,
    calibrate=_calibrate,
    dequantise=_dequantise,
    fault=_fault,
)
