"""References on the CPU for torch_npu's operators with weights of 8 and 4 bits, which check their arguments first.

Written from op-plugin's documentation and the one of aclnnWeightQuantBatchMatmulV2, like references.py.
"""

# The parameters are those of the schemas, which pass them by position.

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HALF, SINGLE, BRAIN = torch.float16, torch.float32, torch.bfloat16
DTYPES = {5: HALF, 15: BRAIN, HALF: HALF, BRAIN: BRAIN}  # also by number, because schemas turn dtypes into numbers
MOST_FEATURES = 65535
NEW_CHIPS = ("A2", "A3", "950")
chip = "A2"  # the family whose conditions are checked; set by those who use the references


def takes(tensors: list[Tensor], dtypes: dict[str, tuple[torch.dtype, ...]]) -> None:
    """Assert that the operator is documented for the chip, and that it accepts tensors of these types."""
    assert chip in dtypes, f"not documented for {chip}"
    for tensor in tensors:
        assert tensor.dtype in dtypes[chip], f"{tensor.dtype} on {chip}"


def npu_weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
) -> Tensor:
    """x @ (weight * scale) + bias, with one scale for each output, or for each pair of input group and output."""
    takes([x, antiquant_scale], {"310P": (HALF,), **dict.fromkeys(NEW_CHIPS, (HALF, BRAIN))})
    is_packed = weight.dtype == torch.int32
    assert weight.dtype == torch.int8 or (is_packed and chip != "310P")
    levels = unpacked(weight) if is_packed else weight
    num_outputs = levels.shape[1]
    _check_sizes(x, weight, num_outputs)
    assert antiquant_scale.dtype == x.dtype
    scale = antiquant_scale.float()
    if antiquant_group_size:
        assert chip != "310P"
        assert antiquant_group_size % 32 == 0
        assert 32 <= antiquant_group_size <= len(weight) - 1
        assert antiquant_scale.shape == (-(-len(weight) // antiquant_group_size), num_outputs)
        assert antiquant_scale.is_contiguous() == weight.is_contiguous(), "both transposed, or neither"
        scale = scale.repeat_interleave(antiquant_group_size, 0)[: len(levels)]
    else:
        assert antiquant_scale.shape == (num_outputs,)
        assert antiquant_scale.is_contiguous()
    assert antiquant_offset is quant_scale is quant_offset is None, "not used by us"
    out = x.float() @ (levels.float() * scale)
    if bias is not None:
        assert bias.shape == (num_outputs,)
        assert bias.dtype == (SINGLE if x.dtype == BRAIN else HALF)
        out = out + bias.float()
    return out.to(x.dtype)


def npu_convert_weight_to_int4pack(weight: Tensor, inner_k_tiles: int = 0) -> Tensor:
    """Pack eight numbers into 32 bits, the first one in the lowest bits.

    The order used by the device is not documented.
    """
    takes([weight], dict.fromkeys(NEW_CHIPS, (torch.int32,)))
    assert weight.dim() == 2
    assert weight.is_contiguous()
    assert weight.shape[1] % 8 == 0
    assert inner_k_tiles == 0, "reserved"
    parts = (weight.long() & 15).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    return parts.sum(-1).to(torch.int32)


def unpacked(packed: Tensor) -> Tensor:
    nibbles = (packed.long()[..., None] >> torch.arange(0, 32, 4)) & 15
    return ((nibbles ^ 8) - 8).flatten(1)


def npu_dynamic_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    takes([x], dict.fromkeys(NEW_CHIPS, (HALF, BRAIN)))
    assert x.dim() > 1
    scale = x.float().abs().amax(-1) / 127
    steps = torch.where(scale > 0, scale, 1.0)[..., None]
    return (x.float() / steps).round().to(torch.int8), scale


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: Any = None,
) -> Tensor:
    takes([x1, x2], dict.fromkeys(("310P", "A2", "A3"), (torch.int8,)))
    _check_sizes(x1, x2, x2.shape[1])
    assert scale.dtype == SINGLE
    assert scale.shape == (x2.shape[1],)
    biases, outputs = (torch.int32,), (HALF,)
    # Sums of products of 8 bits are exact in float64, whose product is much faster than that of integers.
    out = (x1.double() @ x2.double()).float() * scale
    if pertoken_scale is not None:
        assert chip != "310P"
        assert (pertoken_scale.dtype, pertoken_scale.shape) == (SINGLE, x1.shape[:1])
        biases, outputs = (torch.int32, BRAIN, SINGLE), (HALF, BRAIN)
        out = out * pertoken_scale[:, None]
    assert bias is None or (bias.dtype in biases and bias.shape == scale.shape)
    assert DTYPES[output_dtype] in outputs
    return (out if bias is None else out + bias.float()).to(DTYPES[output_dtype])


def _check_sizes(x: Tensor, weight: Tensor, num_outputs: int) -> None:
    assert x.dim() == weight.dim() == 2
    assert x.is_contiguous()
    assert weight.is_contiguous() or weight.T.is_contiguous()
    assert len(weight) == x.shape[1]
    assert min(len(x), len(weight), num_outputs) > 0, "empty tensors are not taken"
    assert max(len(weight), num_outputs) <= MOST_FEATURES


REFERENCES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        npu_weight_quant_batchmatmul,
        npu_convert_weight_to_int4pack,
        npu_dynamic_quant,
        npu_quant_matmul,
    )
}
