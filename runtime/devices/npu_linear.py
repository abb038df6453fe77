"""Linear layers with 8-bit and 4-bit weights on Ascend: the layers, and as data the operators that each chip has.

Families, types and layouts follow the documentation of op-plugin (docs/zh/custom_APIs/torch_npu) and of CANN's
aclnnWeightQuantBatchMatmulV2. Weights have the plain layout, because eager mode accepts no other.
"""

# R rows, K inputs, N outputs, G groups

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llama_adapter.runtime.devices.npu_operators import PLAIN_WANTED, ChipFamily, Choice
from llama_adapter.runtime.operators import ATEN
from llama_adapter.runtime.schemes import OperatorChoice, Precision, int4, int8
from llama_adapter.runtime.schemes.layers import WEIGHT, StoredInt8
from llama_adapter.runtime.schemes.scheme import dtype_name, find_scheme

_MOST_FEATURES = 65535  # the most inputs or outputs that the quantised products accept
_INPUTS_AT_ONCE = 256  # inputs packed at a time, because packing needs 32 bits for each 4-bit weight
_LARGEST_HALF = 32768.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearOperator:
    """An operator for quantised weights, and the chip families that it is documented for, with their types."""

    precision: Precision
    rounds_inputs: bool = False
    implementation: str
    needs: tuple[str, ...]  # required attributes of torch_npu
    dtypes: Mapping[str, tuple[torch.dtype, ...]]  # name of the chip family -> types of activations
    build: Callable[..., nn.Module]  # (layer, type of activations, torch_npu, family)
    fits: Callable[[nn.Linear, torch.dtype], bool]  # (layer, type of activations)


def choose_linear(
    family: ChipFamily,
    precision: Precision,
    activations: torch.dtype,
    *,
    torch_npu: Any,
    wanted: OperatorChoice = "auto",
) -> Choice:
    """The operator for weights of `precision` on a chip of `family`, or `aten` to dequantise them. Never raises."""
    objection = PLAIN_WANTED if wanted == "aten" else refusal(family, precision, wanted=wanted)
    if not objection:
        found = _find(precision, wanted)
        if activations not in found.dtypes[family.name]:
            objection = f"{found.implementation} does not take {dtype_name(activations)} on {family.name}"
        elif missing := [name for name in found.needs if not hasattr(torch_npu, name)]:
            objection = f"this torch_npu has no {missing[0]}"
    if objection:
        return Choice(operator=f"{precision} weights", implementation=ATEN.name, reason=objection)
    reason = f"documented for {family.name} in {dtype_name(activations)}"
    return Choice(operator=f"{precision} weights", implementation=found.implementation, reason=reason)


def refusal(family: ChipFamily, precision: Precision, *, wanted: OperatorChoice = "auto") -> str:
    """Why chips of this family have no operator for these weights with any type of activations; empty if they have."""
    found = _find(precision, wanted)
    if family.name in found.dtypes:
        return ""
    return f"{found.implementation} is not documented for {find_scheme(precision).title} weights on {family.name}"


def build_linear(
    linear: nn.Linear,
    activations: torch.dtype,
    *,
    precision: Precision,
    family: ChipFamily,
    torch_npu: Any,
    wanted: OperatorChoice = "auto",
) -> nn.Module | None:
    """The layer that computes with these stored weights; None if no operator supports its sizes."""
    found = _find(precision, wanted)
    sizes = linear.in_features, linear.out_features
    if max(sizes) > _MOST_FEATURES or not found.fits(linear, activations):
        return None
    return found.build(linear, activations, torch_npu, family)


class WeightOnlyLinear(nn.Module):
    """Weights of 8 or 4 bits and float inputs: (..., K) to (..., N) in the type of the inputs.

    Scales are rounded to this type: in bfloat16, those of 4 bits lose three of their ten bits.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, activations: torch.dtype, torch_npu: Any, family: ChipFamily) -> None:
        super().__init__()
        self._torch_npu = torch_npu
        stored, scale = linear.weight.detach(), getattr(linear, WEIGHT + int8.SCALE)
        has_groups = stored.dtype == torch.uint8
        self._group_size = int4.GROUP if has_groups else 0  # 0: one scale for each row, the operator's default
        self.register_buffer("weight", _pack4(stored, torch_npu) if has_groups else stored.contiguous())
        self.register_buffer("scale", (scale.T if has_groups else scale).to(activations).contiguous())
        self.register_buffer("bias", _bias(linear, activations))

    def forward(self, x: Tensor) -> Tensor:
        rows_RK = x.reshape(-1, x.shape[-1]).contiguous()
        weight = self.weight if self._group_size else self.weight.transpose(0, 1)
        out_RN: Tensor = self._torch_npu.npu_weight_quant_batchmatmul(
            rows_RK, weight, self.scale, bias=self.bias, antiquant_group_size=self._group_size
        )
        return out_RN.view(*x.shape[:-1], -1)


def _pack4(stored: Tensor, torch_npu: Any) -> Tensor:
    """Stored weights of 4 bits as int32 (K, N / 8), the recommended layout for groups: 32 bits hold eight outputs."""
    num_outputs, num_inputs = len(stored), 2 * stored.shape[1]
    packed = torch.empty(num_inputs, num_outputs // 8, dtype=torch.int32, device=stored.device)
    for start in range(0, num_inputs, _INPUTS_AT_ONCE):
        part = stored[:, start // 2 : (start + _INPUTS_AT_ONCE) // 2]
        levels_KN = int4.unpacked(part).T.to(torch.int32) - int4.MIDDLE
        packed[start : start + _INPUTS_AT_ONCE] = torch_npu.npu_convert_weight_to_int4pack(levels_KN.contiguous())
    return packed


class RoundedLinear(StoredInt8):
    """8-bit weights, and inputs rounded to 8 bits with a scale for each row, or by torch with a calibrated one."""

    def __init__(self, linear: nn.Linear, activations: torch.dtype, torch_npu: Any, family: ChipFamily) -> None:
        super().__init__(linear)
        self._torch_npu = torch_npu
        self.bias = None if self.bias is None else self.bias.float()

    def forward(self, x: Tensor) -> Tensor:
        rows_RK = x.reshape(-1, x.shape[-1]).contiguous()
        if self.input_scale is None:
            values_RK, steps_R = self._torch_npu.npu_dynamic_quant(rows_RK)
        else:
            values_RK, steps_R = int8.quantise_rows(rows_RK, self.input_scale)
        out_RN: Tensor = self._torch_npu.npu_quant_matmul(
            values_RK,
            self.weight.transpose(0, 1),
            self.scale,
            pertoken_scale=steps_R.flatten(),
            bias=self.bias,
            output_dtype=x.dtype,
        )
        return out_RN.view(*x.shape[:-1], -1)


class RoundedLinear310P(RoundedLinear):
    """As `RoundedLinear`, for a chip without operators for rounding and for scales of rows: plain torch does both.

    The product is float16 before the rows' scales are applied. A power of two keeps it within the range of float16.
    """

    def __init__(self, linear: nn.Linear, activations: torch.dtype, torch_npu: Any, family: ChipFamily) -> None:
        super().__init__(linear, activations, torch_npu, family)
        sums_N = linear.weight.detach().short().abs().sum(dim=1, dtype=torch.float32)
        largest = float((sums_N * self.scale).max()) * int8.LARGEST
        self.shrinking = 1.0
        while largest * self.shrinking > _LARGEST_HALF:
            self.shrinking /= 2
        self.scale.mul_(self.shrinking)

    def forward(self, x: Tensor) -> Tensor:
        values_RK, steps_R1 = int8.quantise_rows(x.reshape(-1, x.shape[-1]), self.input_scale)
        product_RN: Tensor = self._torch_npu.npu_quant_matmul(
            values_RK, self.weight.transpose(0, 1), self.scale, output_dtype=torch.float16
        )
        out_RN = product_RN.float() * (steps_R1 / self.shrinking)
        out_RN = out_RN if self.bias is None else out_RN + self.bias
        return out_RN.to(x.dtype).view(*x.shape[:-1], -1)


def _bias(linear: nn.Linear, activations: torch.dtype) -> Tensor | None:
    """The bias in the type that the weight-only product requires."""
    if linear.bias is None:
        return None
    return linear.bias.detach().to(torch.float32 if activations == torch.bfloat16 else activations)


def _rounded(linear: nn.Linear, activations: torch.dtype, torch_npu: Any, family: ChipFamily) -> nn.Module:
    made = RoundedLinear310P if family.name == "310P" else RoundedLinear
    return made(linear, activations, torch_npu, family)


def _holds_scales(linear: nn.Linear, activations: torch.dtype) -> bool:
    """Whether scales keep their precision in the type of the activations; float16 loses it below its normal numbers."""
    scale: Tensor = getattr(linear, WEIGHT + int8.SCALE)
    return bool(scale.min() >= torch.finfo(activations).smallest_normal)


def _holds_groups(linear: nn.Linear, activations: torch.dtype) -> bool:
    """Whether the sizes fit: a group must be smaller than the number of inputs, and 32 bits hold eight outputs."""
    return linear.in_features % int4.GROUP == 0 < linear.in_features - int4.GROUP and linear.out_features % 8 == 0


_HALVES = (torch.float16, torch.bfloat16)
_NEW = {"A2": _HALVES, "A3": _HALVES}
_BY_GROUP_OR_ROW = "npu_weight_quant_batchmatmul"
LINEAR = (
    LinearOperator(
        precision="int8",
        implementation=_BY_GROUP_OR_ROW,
        needs=(_BY_GROUP_OR_ROW,),
        dtypes={"310P": (torch.float16,), **_NEW, "950": _HALVES},
        build=WeightOnlyLinear,
        fits=_holds_scales,
    ),
    LinearOperator(
        precision="int4",
        implementation=_BY_GROUP_OR_ROW,
        needs=(_BY_GROUP_OR_ROW, "npu_convert_weight_to_int4pack"),
        dtypes={**_NEW, "950": _HALVES},
        build=WeightOnlyLinear,
        fits=_holds_groups,
    ),
    LinearOperator(
        precision="int8",
        rounds_inputs=True,
        implementation="npu_quant_matmul",
        needs=("npu_quant_matmul", "npu_dynamic_quant"),
        dtypes={"310P": (torch.float16,), **_NEW},
        build=_rounded,
        fits=lambda linear, activations: True,
    ),
)


def _find(precision: Precision, wanted: OperatorChoice) -> LinearOperator:
    rounds_inputs = wanted == "w8a8" and precision == "int8"
    return next(one for one in LINEAR if (one.precision, one.rounds_inputs) == (precision, rounds_inputs))
