"""Ascend's chips and their fused operators as data, and the choice of operators for a chip and a model.

Plain torch computes the other operators; every chip supports it. The layout of linear weights is chosen here too,
because it determines the kernel that multiplies them.
"""

# B rows, S step tokens, P positions attended to, N heads, H head size

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from llama_adapter.runtime.operators import (
    ATEN,
    DecoderSizes,
    Operators,
    fused_adapter_attention,
    fused_causal_attention,
)
from llama_adapter.runtime.schemes import OperatorChoice
from llama_adapter.runtime.schemes.scheme import dtype_name

LAYOUT = "linear layout"  # stands for an operator's name in the choice of the memory layout of linear weights
TILED, PLAIN = "FRACTAL_NZ", "ND"
PLAIN_WANTED = "plain torch was asked for"
FRACTAL_NZ = 29  # torch_npu.Format: the tiled layout that the matrix unit reads


@dataclass(frozen=True, kw_only=True, slots=True)
class ChipFamily:
    """Chips that share their operators."""

    name: str
    # The codes of torch.npu.get_soc_version(); torch_npu 2.13, csrc/core/npu/NpuVariables.h.
    soc_versions: range
    dtypes: tuple[str, ...] = ("float16", "float32")  # the best one first
    graph_modes: tuple[str, ...] = ()
    # Whether float16 linear weights are stored in FRACTAL_NZ, because the matrix unit would rearrange plain weights
    # at every call.
    tiled_weights: bool = False
    # Whether operators can be compiled for every shape, so that CANN's ready-made ones must be chosen explicitly. A
    # chip that has only ready-made operators reports an error if they are chosen.
    may_compile_operators: bool = False


_WITH_BFLOAT16 = ("bfloat16", "float16", "float32")
_GRAPHS = ("npugraph_ex", "ge_graph")  # torchair's overview lists A2, A3 and 950, one NPU per process

FAMILIES = (
    ChipFamily(name="910", soc_versions=range(100, 105), tiled_weights=True, may_compile_operators=True),
    ChipFamily(name="310P", soc_versions=range(200, 206), tiled_weights=True, may_compile_operators=True),
    ChipFamily(
        name="A2", soc_versions=range(220, 226), dtypes=_WITH_BFLOAT16, graph_modes=_GRAPHS, may_compile_operators=True
    ),
    ChipFamily(name="310B", soc_versions=range(240, 244), dtypes=_WITH_BFLOAT16, may_compile_operators=True),
    ChipFamily(
        name="A3", soc_versions=range(250, 257), dtypes=_WITH_BFLOAT16, graph_modes=_GRAPHS, may_compile_operators=True
    ),
    ChipFamily(name="950", soc_versions=range(260, 261), dtypes=_WITH_BFLOAT16, graph_modes=_GRAPHS),
)
UNKNOWN = ChipFamily(name="unknown", soc_versions=range(0))


def family_of(soc_version: int) -> ChipFamily:
    """The family of a chip's code. Codes of future chips give `UNKNOWN`, which uses plain torch only."""
    return next((family for family in FAMILIES if soc_version in family.soc_versions), UNKNOWN)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The implementation of an operator, and the reason for it."""

    operator: str
    implementation: str
    reason: str

    @property
    def is_own(self) -> bool:
        """Whether it differs from plain torch."""
        return self.implementation not in (ATEN.name, PLAIN)


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedOperator:
    """A fused implementation of one operator, and its requirements.

    `dtypes` maps the chip families that it is documented for to the types that it accepts there (op-plugin's
    documentation of the custom API, and torch_npu's own routing of attention).
    """

    operator: str
    implementation: str
    needs: str  # required attribute of torch_npu; empty if torch_npu routes a plain operator of torch to it
    dtypes: Mapping[str, tuple[torch.dtype, ...]]
    fits: Callable[[DecoderSizes, torch.dtype], str]  # why the operator does not support a model, or an empty string
    build: Callable[[Any], Callable[..., Any]]  # makes the operator from the module torch_npu
    beside: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # operators to replace along with it
    # Whether compiled graphs may contain it. They may not contain an operator that returns its own arguments without
    # declaring that in its schema, because torch.compile assumes that the result is a new tensor.
    in_graphs: bool = True


def choose(
    family: ChipFamily,
    sizes: DecoderSizes,
    dtype: torch.dtype,
    *,
    torch_npu: ModuleType,
    wanted: OperatorChoice = "auto",
    in_graph: bool = False,
) -> tuple[Operators, tuple[Choice, ...]]:
    """Operators for a decoder of these sizes in `dtype` on a chip of `family`, with reasons; LAYOUT is the last choice.

    Never raises. If there is no fused operator, for example in an older torch_npu, plain torch computes.
    """
    chosen: dict[str, Any] = {}
    choices = []
    for fused in FUSED:
        objection = _objection(fused, family, sizes, dtype, torch_npu=torch_npu, wanted=wanted, in_graph=in_graph)
        if objection:
            choices.append(Choice(operator=fused.operator, implementation="aten", reason=objection))
        else:
            chosen |= {fused.operator: fused.build(torch_npu), **fused.beside}
            reason = f"documented for {family.name} in {dtype_name(dtype)}"
            choices.append(Choice(operator=fused.operator, implementation=fused.implementation, reason=reason))
    fused_names = [choice.operator for choice in choices if choice.implementation != "aten"]
    choices.append(_layout(family, dtype, wanted=wanted))
    if not chosen:
        return ATEN, tuple(choices)
    name = f"{family.name}: {', '.join(fused_names)}"  # all other operators are plain torch
    return dataclasses.replace(ATEN, name=name, **chosen), tuple(choices)


def _objection(
    fused: FusedOperator,
    family: ChipFamily,
    sizes: DecoderSizes,
    dtype: torch.dtype,
    *,
    torch_npu: ModuleType,
    wanted: str,
    in_graph: bool,
) -> str:
    if wanted == "aten":
        return PLAIN_WANTED
    if in_graph and not fused.in_graphs:
        return f"{fused.implementation} overwrites its arguments, which graphs do not allow"
    if family.name not in fused.dtypes:
        return f"{fused.implementation} is not documented for {family.name}"
    if dtype not in fused.dtypes[family.name]:
        return f"{fused.implementation} does not take {dtype_name(dtype)} on {family.name}"
    if unfit := fused.fits(sizes, dtype):
        return f"{fused.implementation} {unfit}"
    if fused.needs and not hasattr(torch_npu, fused.needs):
        return f"this torch_npu has no {fused.needs}"
    return ""


def _layout(family: ChipFamily, dtype: torch.dtype, *, wanted: str) -> Choice:
    if wanted == "aten":
        implementation, reason = PLAIN, PLAIN_WANTED
    elif not family.tiled_weights:
        implementation, reason = PLAIN, f"{family.name} multiplies by plain weights as they are"
    elif dtype != torch.float16:
        implementation, reason = PLAIN, f"tiles are for float16, and these weights are {dtype_name(dtype)}"
    else:
        implementation, reason = TILED, f"{family.name} would rearrange plain weights at every call"
    return Choice(operator=LAYOUT, implementation=implementation, reason=reason)


def _lay_out_rotary(cos_BS1H: Tensor, sin_BS1H: Tensor, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tables in the layout of the fused rotation.

    It needs one dtype for all arguments, and a row of the table for each row of q.
    """

    def laid_out(table_BS1H: Tensor) -> Tensor:
        return table_BS1H.to(dtype).expand(num_rows, -1, -1, -1).contiguous()

    return laid_out(cos_BS1H), laid_out(sin_BS1H)


def _rotate(torch_npu: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def rotate(q_BSNH: Tensor, k_BSNH: Tensor, cos_BS1H: Tensor, sin_BS1H: Tensor) -> tuple[Tensor, Tensor]:
        # The kernel overwrites q and k. Usually they are copies that are made here. For a single row and token, they
        # are views of the packed projection, whose q, k and v do not overlap and are not read again.
        q_BSNH, k_BSNH = q_BSNH.contiguous(), k_BSNH.contiguous()
        rotated: tuple[Tensor, Tensor] = torch_npu.npu_apply_rotary_pos_emb(q_BSNH, k_BSNH, cos_BS1H, sin_BS1H)
        return rotated

    return rotate


def _store(torch_npu: Any) -> Callable[..., None]:
    def store(cache_BNPH: Tensor, positions_B: Tensor, new_BN1H: Tensor) -> None:
        torch_npu.scatter_update_(cache_BNPH, positions_B, new_BN1H, -2)

    return store


def _norm_fits(sizes: DecoderSizes, dtype: torch.dtype) -> str:
    num_bytes = min(sizes.dim, sizes.head_dim if sizes.qk_norm == "head" else sizes.dim) * dtype.itemsize
    return "" if num_bytes >= 32 else f"needs rows of at least 32 bytes, and these have {num_bytes}"


def _rotary_fits(sizes: DecoderSizes, dtype: torch.dtype) -> str:
    return "" if sizes.head_dim in (64, 128) else f"needs heads of size 64 or 128, and these have {sizes.head_dim}"


def _swiglu_fits(sizes: DecoderSizes, dtype: torch.dtype) -> str:
    width = 2 * sizes.ffn_dim
    return "" if width % 32 == 0 else f"needs a width that is a multiple of 32, and this one is {width}"


def _attention_fits(sizes: DecoderSizes, dtype: torch.dtype) -> str:
    return "" if sizes.head_dim <= 512 else f"needs heads of size 512 at most, and these have {sizes.head_dim}"


_HALF, _SINGLE, _BRAIN = torch.float16, torch.float32, torch.bfloat16
_ALL = (_HALF, _SINGLE, _BRAIN)
_OLD = (_HALF, _SINGLE)
_FUSED_ATTENTION = {"A2": _ALL, "A3": _ALL}

FUSED = (
    FusedOperator(
        operator="rms_norm",
        implementation="npu_rms_norm",
        needs="npu_rms_norm",
        dtypes={"310P": _OLD, "A2": _ALL, "A3": _ALL},
        fits=_norm_fits,
        build=lambda torch_npu: lambda x, weight, eps: torch_npu.npu_rms_norm(x, weight, eps)[0],
    ),
    FusedOperator(
        operator="rotate",
        implementation="npu_apply_rotary_pos_emb",
        needs="npu_apply_rotary_pos_emb",
        dtypes={"310P": _OLD, "A2": _ALL, "A3": _ALL, "950": _ALL},
        fits=_rotary_fits,
        build=_rotate,
        beside={"lay_out_rotary": _lay_out_rotary},
        in_graphs=False,
    ),
    FusedOperator(
        operator="swiglu",
        implementation="npu_swiglu",
        needs="npu_swiglu",
        # Documented for A2; used on 310P (multiples of 32) and on A3 by serving stacks, in half precision.
        dtypes={"310P": (_HALF,), "A2": _ALL, "A3": _ALL},
        fits=_swiglu_fits,
        build=lambda torch_npu: lambda gate_up: torch_npu.npu_swiglu(gate_up.contiguous()),
    ),
    FusedOperator(
        operator="causal_attention",
        implementation="scaled_dot_product_attention",
        needs="",
        dtypes=_FUSED_ATTENTION,
        fits=_attention_fits,
        # With a bool mask, torch_npu uses its fused attention. It inverts the mask itself.
        build=lambda torch_npu: fused_causal_attention,
    ),
    FusedOperator(
        operator="adapter_attention",
        implementation="scaled_dot_product_attention",
        needs="",
        dtypes=_FUSED_ATTENTION,
        fits=_attention_fits,
        build=lambda torch_npu: fused_adapter_attention,
    ),
    FusedOperator(
        operator="store",
        implementation="scatter_update_",
        needs="scatter_update_",
        dtypes={"910": _OLD, "A2": _ALL, "A3": _ALL, "950": _ALL},
        fits=lambda sizes, dtype: "",
        build=_store,
    ),
)
