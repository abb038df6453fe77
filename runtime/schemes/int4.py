"""4-bit weights: 32 inputs of an output share a scale, W = (code - 8) * scale, with codes 0..15. 4.5 bits per weight.

Stored are two codes in a byte, uint8 (out, in / 2), the even input in the low half, and float16 scales
(out, in / 32, rounded up). The layout is that of `MatMulNBits` in onnxruntime.
"""

import torch
from torch import Tensor

from llama_adapter.runtime.schemes.scheme import Parts, Scheme, TensorForm

GROUP = 32
SCALE = "_scale"
_MIDDLE = 8
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
    places = weight_OGI.abs().argmax(-1, keepdim=True)
    widest = weight_OGI.gather(-1, places)[..., 0] / -_MIDDLE
    best_codes = best_scales = best_errors = None
    for factor in _FACTORS:
        scales = (widest * factor).half()
        scales = torch.where(scales == 0, torch.ones_like(scales), scales)
        if not bool(scales.isfinite().all()):
            raise ValueError("too large for a scale in float16")
        steps = scales.float()[..., None]
        codes = (weight_OGI / steps).round_().clamp_(-_MIDDLE, _MIDDLE - 1)
        errors = (codes * steps - weight_OGI).square_().sum(-1)
        if best_codes is None or best_scales is None or best_errors is None:
            best_codes, best_scales, best_errors = codes, scales, errors
            continue
        is_better = errors < best_errors
        best_errors = torch.where(is_better, errors, best_errors)
        best_scales = torch.where(is_better, scales, best_scales)
        best_codes = torch.where(is_better[..., None], codes, best_codes)
    assert best_codes is not None
    assert best_scales is not None
    return (best_codes + _MIDDLE).to(torch.uint8), best_scales


def _quantise(weight: Tensor) -> Parts:
    num_inputs = weight.shape[1]
    if num_inputs % 2:
        raise ValueError("an odd number of inputs")
    codes, scales = quantise_groups(weight)
    flat = codes.flatten(1)[:, :num_inputs]
    return {"": flat[:, 0::2] | (flat[:, 1::2] << 4), SCALE: scales}


def unpacked(stored: Tensor) -> Tensor:
    """Stored weight uint8 (out, in / 2) -> codes uint8 (out, in)."""
    return torch.stack([stored & 15, stored >> 4], dim=-1).flatten(1)


def _dequantise(parts: Parts) -> Tensor:
    codes = unpacked(parts[""])
    steps = parts[SCALE].float().repeat_interleave(GROUP, dim=1)[:, : codes.shape[1]]
    return (codes.float() - _MIDDLE).mul_(steps)


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
    dequantise=_dequantise,
    fault=_fault,
    foreign=lambda weight: "",
)
