"""4-bit weights: 32 inputs of an output share a scale, W = (code - 8) * scale, with codes 0..15. 4.5 bits per weight.

A byte stores two codes, the even input in the low half: uint8 (out, in / 2). Scales are float16 (out, in / 32, rounded
up). The layout is that of `MatMulNBits` in onnxruntime.

The C kernels round many times faster than numpy, which rounds without them, to the same codes and scales.
"""

# O outputs, I inputs, G groups of an output, E inputs of a group, P pairs of them

import torch
from torch import Tensor

from llama_adapter.runtime.kernels.arrays import GROUP as GROUP
from llama_adapter.runtime.kernels.library import find_library
from llama_adapter.runtime.schemes import arrays
from llama_adapter.runtime.schemes.arrays import MIDDLE as MIDDLE
from llama_adapter.runtime.schemes.gptq import round_columns
from llama_adapter.runtime.schemes.scheme import Parts, Scheme, TensorForm

SCALE = "_scale"
_LEVELS = (-MIDDLE, MIDDLE - 1)
# Numbers that are rounded in one call. Those for numpy fit into the cache.
_NUMBERS_FOR_KERNELS, _NUMBERS_FOR_NUMPY = 1 << 22, 1 << 18


def quantise_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weight (out, in) of any float type -> bytes of two codes (out, groups, 16) and float16 scales (out, groups).

    In the first of three scales that are tried, the weight of largest magnitude in a group gets the code 0, level -8,
    because the largest level is only 7. That scale is therefore negative if this weight is positive. Of the three, the
    one with the least error is chosen, and then changed to the best scale for its codes by least squares. Squared
    errors count 1 + 2 (w / largest w)^2 times, because the largest weights often belong to outliers among the inputs.
    The last group of a row is padded with zeros. Raises ValueError for a weight that is not finite or too large for a
    scale in float16. The results are on the device of the weight. They are computed on the CPU.
    """
    num_outputs, num_inputs = weight.shape
    num_groups = -(-num_inputs // GROUP)
    codes_OGP = torch.empty(num_outputs, num_groups, GROUP // 2, dtype=torch.uint8, device=weight.device)
    scales_OG = torch.empty(num_outputs, num_groups, dtype=torch.float16, device=weight.device)
    kernels = find_library().library
    num_rows = max((_NUMBERS_FOR_NUMPY if kernels is None else _NUMBERS_FOR_KERNELS) // num_inputs, 1)
    for start in range(0, num_outputs, num_rows):
        part = slice(start, start + num_rows)
        rows_OI = weight[part].detach().cpu()
        bits_OI = rows_OI.view(torch.uint16) if rows_OI.dtype == torch.bfloat16 else rows_OI.float()
        codes_OGP[part], scales_OG[part] = map(torch.from_numpy, arrays.round_int4(bits_OI.numpy(), library=kernels))
    return codes_OGP, scales_OG


def _quantise(weight: Tensor) -> Parts:
    _require_even(weight.shape[1])
    codes, scales = quantise_groups(weight)
    return {"": codes.flatten(1)[:, : weight.shape[1] // 2].contiguous(), SCALE: scales}


def _observe(hessian: Tensor | None, x: Tensor) -> Tensor:
    return (torch.zeros(x.shape[1], x.shape[1]) if hessian is None else hessian).addmm_(x.T, x)


def _calibrate(weight: Tensor, hessian: Tensor) -> Parts:
    _require_even(weight.shape[1])
    levels, scales = round_columns(weight, hessian, group=GROUP, choose_scales=_choose_scales, levels=_LEVELS)
    return {"": torch.from_numpy(arrays.in_pairs(levels.numpy())), SCALE: scales.half()}


def _choose_scales(weight_OE: Tensor, cost_E: Tensor) -> Tensor:
    return torch.from_numpy(arrays.choose_scales(weight_OE.numpy(), cost_E.numpy()))


def _require_even(num_inputs: int) -> None:
    if num_inputs % 2:
        raise ValueError(f"its number of inputs, {num_inputs}, is odd")


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
