"""8-bit weights: int8 (out, in) in -127..127 with a float32 scale for each output, W = weight * scale[:, None].

The error of a weight is at most half a step of its row: |W - dequantised| <= scale / 2. A calibrated layer also has a
scale of its inputs, which operators w8a8 use for every row.
"""

import torch
from torch import Tensor

from llama_adapter.runtime.schemes.arrays import LARGEST as LARGEST
from llama_adapter.runtime.schemes.scheme import Parts, Scheme, TensorForm

SCALE = "_scale"  # the scales of `head.weight` are `head.weight_scale`
INPUT_SCALE = "_input_scale"  # of a calibrated layer's inputs, float32 (1,); see `app/models/input_scales.py`
_NUMBERS_AT_ONCE = 1 << 18  # that are rounded in one call: as float32 they fit into the cache
_NUMBERS_ON_DEVICE = 1 << 26  # on an accelerator, where each call costs more than its memory


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weight (out, in) of any float type -> int8 (out, in) and float32 scales (out,), on the device of the weight.

    A scale is the largest magnitude of its row divided by 127, or 1 if that is 0 in float32. Raises ValueError for a
    weight that is not finite.
    """
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    num_rows = max((_NUMBERS_AT_ONCE if weight.is_cpu else _NUMBERS_ON_DEVICE) // weight.shape[1], 1)
    for start in range(0, len(weight), num_rows):
        part = slice(start, start + num_rows)
        numbers = weight[part].float()
        largest = numbers.abs().amax(dim=1)
        if not bool(largest.isfinite().all()):
            raise ValueError("a number is infinite or NaN")
        steps = largest / LARGEST
        scales[part] = torch.where(steps > 0, steps, 1.0)
        values[part] = (numbers / scales[part, None]).round_().clamp_(-LARGEST, LARGEST)
    return values, scales


def quantise_rows(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Activations (rows, in) of any float type -> int8 (rows, in) and float32 scales (rows, 1), on the device of `x`.

    A scale is the largest magnitude of its row divided by 127. A row of zeros stays zeros. With a `scale` (1,), all
    rows have this one, and larger inputs saturate; the scale of a row with NaN or infinity is NaN.
    """
    numbers = x.float()
    if scale is not None:
        levels = (numbers / scale).round_().clamp_(-LARGEST, LARGEST)
        return levels.to(torch.int8), scale + (numbers * 0).sum(dim=1, keepdim=True)
    scales = (numbers.abs().amax(dim=1, keepdim=True) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    return (numbers / scales).round_().to(torch.int8), scales


def _observe(largest: Tensor | None, x: Tensor) -> Tensor:
    found = x.abs().amax().reshape(1)
    return found if largest is None else torch.maximum(largest, found)


def _calibrate(weight: Tensor, largest: Tensor) -> Parts:
    """As `quantise`, with the scale of inputs of the magnitude `largest` or less; inputs of zeros have the scale 1."""
    if not bool(largest.isfinite()):
        raise ValueError("an input is infinite or NaN")
    return {**_quantise(weight), INPUT_SCALE: torch.where(largest > 0, largest / LARGEST, 1.0)}


def _quantise(weight: Tensor) -> Parts:
    values, scales = quantise_weight(weight)
    return {"": values, SCALE: scales}


def _fault(suffix: str, tensor: Tensor) -> str:
    is_sound = suffix != SCALE or bool((tensor.isfinite() & (tensor > 0)).all())
    return "" if is_sound else "scales that are not finite numbers above 0"


SCHEME = Scheme(
    name="int8",
    title="8-bit",
    weight_dtype=torch.int8,
    weights_per_item=1,
    suffixes=("", SCALE),
    forms=lambda shape, dtype: {"": TensorForm(shape, torch.int8), SCALE: TensorForm(shape[:1], torch.float32)},
    quantise=_quantise,
    observe=_observe,
    calibrate=_calibrate,
    dequantise=lambda parts: parts[""].float() * parts[SCALE][:, None],
    fault=_fault,
)
