"""4-bit weights: 32 inputs of an output share a scale, W = (code - 8) * scale, with codes 0..15. 4.5 bits per weight.

Stored are two codes in a byte, uint8 (out, in / 2), the even input in the low half, and float16 scales
(out, in / 32, rounded up). The layout is that of `MatMulNBits` in onnxruntime.
"""

import torch
from torch import Tensor

from llama_adapter.runtime.schemes.gptq import round_columns
from llama_adapter.runtime.schemes.scheme import Parts, Scheme, TensorForm

GROUP = 32
SCALE = "_scale"
MIDDLE = 8
_LEVELS = (-MIDDLE, MIDDLE - 1)
_FACTORS = (1.0, 0.95, 0.9, 0.85)  # of the scale that holds the largest weight; smaller steps, for clipping it
_NUMBERS_AT_ONCE = 1 << 18


def quantise_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weight (out, in) of any float type -> codes uint8 (out, groups, 32) and float16 scales (out, groups).

    The largest magnitude of a group gets the code 0, which no other sign has: so a scale may be negative. Of four
    scales the one with the least squared error is taken. A group at the end of a row is filled with zeros. Raises
    ValueError for a weight that is not finite, or that float16 cannot scale.
    """
    num_outputs, num_inputs = weight.shape
    num_groups = -(-num_inputs // GROUP)
    codes = torch.empty(num_outputs, num_groups, GROUP, dtype=torch.uint8)
    scales = torch.empty(num_outputs, num_groups, dtype=torch.float16)
    num_rows = max(_NUMBERS_AT_ONCE // num_inputs, 1)
    for start in range(0, num_outputs, num_rows):
        part = slice(start, start + num_rows)
        numbers = weight[part].float()
        if not bool(numbers.isfinite().all()):
            raise ValueError("infinite or NaN")
        padded = torch.nn.functional.pad(numbers, (0, num_groups * GROUP - num_inputs))
        codes[part], scales[part] = _quantise_rows(padded.reshape(-1, num_groups, GROUP))
    return codes, scales


def _quantise_rows(weight_OGI: Tensor) -> tuple[Tensor, Tensor]:
    steps_OG1 = _choose_scales(weight_OGI, torch.ones(GROUP))
    return _codes((weight_OGI / steps_OG1).round_().clamp_(*_LEVELS)), steps_OG1[..., 0].half()


def _choose_scales(weight: Tensor, cost_I: Tensor) -> Tensor:
    """Groups of weights (..., I) -> scales (..., 1), of four the one with the least squared error times `cost_I` (I,).

    They are float32, of float16's values. Raises ValueError for what float16 cannot scale.
    """
    places = weight.abs().argmax(-1, keepdim=True)
    widest = weight.gather(-1, places) / -MIDDLE
    best_steps = best_errors = None
    for factor in _FACTORS:
        steps = (widest * factor).half().float()
        steps = torch.where(steps == 0, torch.ones_like(steps), steps)
        if not bool(steps.isfinite().all()):
            raise ValueError("too large for a scale in float16")
        rounded = (weight / steps).round_().clamp_(*_LEVELS).mul_(steps)
        errors = rounded.sub_(weight).square_().mul_(cost_I).sum(-1, keepdim=True)
        if best_steps is None or best_errors is None:
            best_steps, best_errors = steps, errors
            continue
        best_steps = torch.where(errors < best_errors, steps, best_steps)
        best_errors = torch.minimum(errors, best_errors)
    assert best_steps is not None
    return best_steps


def _quantise(weight: Tensor) -> Parts:
    codes, scales = quantise_groups(weight)
    return _packed(codes.flatten(1)[:, : weight.shape[1]], scales)


def _calibrate(weight: Tensor, hessian: Tensor) -> Parts:
    levels, scales = round_columns(weight, hessian, group=GROUP, choose_scales=_choose_scales, levels=_LEVELS)
    return _packed(_codes(levels), scales.half())


def _codes(levels: Tensor) -> Tensor:
    return (levels + MIDDLE).to(torch.uint8)


def _packed(codes: Tensor, scales: Tensor) -> Parts:
    if codes.shape[1] % 2:
        raise ValueError("an odd number of inputs")
    return {"": codes[:, 0::2] | (codes[:, 1::2] << 4), SCALE: scales}


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
    bundle_version=3,
    weight_dtype=torch.uint8,
    weights_per_item=2,
    suffixes=("", SCALE),
    forms=lambda shape, dtype: {
        "": TensorForm((shape[0], shape[1] // 2), torch.uint8),
        SCALE: TensorForm((shape[0], -(-shape[1] // GROUP)), torch.float16),
    },
    quantise=_quantise,
    calibrate=_calibrate,
    dequantise=_dequantise,
    fault=_fault,
    foreign=lambda weight: "",
)
