"""The decoder's operators on Ascend: what fused ones demand, as data, and which of them suit a chip and a model.

What is not allowed here is computed by plain torch, which every chip can. The layout of linear weights is chosen here
as well, since it decides by which kernel they are multiplied.
"""

# B rows, S step tokens, P positions attended to, Q adapter queries, N heads, H head size, F feed-forward width

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.runtime.devices.npu_chips import ChipFamily
from llama_adapter.runtime.operators.base import ATEN, Operators

LAYOUT = "linear layout"  # the operator's name in the choice of how linear weights lie in memory
TILED, PLAIN = "FRACTAL_NZ", "ND"
PLAIN_WANTED = "plain torch was asked for"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Which implementation an operator got, and why."""

    operator: str
    implementation: str
    reason: str

    @property
    def is_own(self) -> bool:
        """Whether it is other than what plain torch does anywhere."""
        return self.implementation not in (ATEN.name, PLAIN)


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedOperator:
    """An implementation of one operator and what must hold for it to be called.

    `dtypes` names the families it is documented for, each with the types it takes there (op-plugin's documentation
    of the custom API, and torch_npu's own routing of attention).
    """

    operator: str
    implementation: str
    needs: str  # attribute of torch_npu; empty where plain torch leads there
    dtypes: Mapping[str, tuple[torch.dtype, ...]]
    fits: Callable[[DecoderConfig, torch.dtype], str]  # what is wrong with a model, or nothing
    build: Callable[[Any], Callable[..., Any]]
    beside: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # operators that go with it
    # Whether it may stand in a compiled graph. One that returns its own arguments without its schema saying so may
    # not: torch.compile takes the result for a tensor of its own.
    in_graphs: bool = True


def choose(
    family: ChipFamily,
    config: DecoderConfig,
    dtype: torch.dtype,
    *,
    torch_npu: ModuleType,
    wanted: Literal["auto", "aten"] = "auto",
    in_graph: bool = False,
) -> tuple[Operators, tuple[Choice, ...]]:
    """Operators for a decoder of `config` in `dtype` on a chip of `family`, with the reason for each; LAYOUT is last.

    Never raises: what cannot be fused stays plain torch. An older torch_npu that lacks an operator counts as that.
    """
    chosen: dict[str, Callable[..., Any]] = {}
    choices = []
    for fused in FUSED:
        objection = _objection(fused, family, config, dtype, torch_npu=torch_npu, wanted=wanted, in_graph=in_graph)
        if objection:
            choices.append(Choice(operator=fused.operator, implementation="aten", reason=objection))
        else:
            chosen |= {fused.operator: fused.build(torch_npu), **fused.beside}
            reason = f"documented for {family.name} in {_name(dtype)}"
            choices.append(Choice(operator=fused.operator, implementation=fused.implementation, reason=reason))
    fused_names = [choice.operator for choice in choices if choice.implementation != "aten"]
    choices.append(_layout(family, dtype, wanted=wanted))
    if not chosen:
        return ATEN, tuple(choices)
    name = f"{family.name}: {', '.join(fused_names)}"  # the others are plain
    return dataclasses.replace(ATEN, name=name, **chosen), tuple(choices)


def _objection(
    fused: FusedOperator,
    family: ChipFamily,
    config: DecoderConfig,
    dtype: torch.dtype,
    *,
    torch_npu: ModuleType,
    wanted: str,
    in_graph: bool,
) -> str:
    if wanted == "aten":
        return PLAIN_WANTED
    if in_graph and not fused.in_graphs:
        return f"{fused.implementation} writes over its arguments, which graphs do not bear"
    if family.name not in fused.dtypes:
        return f"{fused.implementation} is not documented for {family.name}"
    if dtype not in fused.dtypes[family.name]:
        return f"{fused.implementation} does not take {_name(dtype)} on {family.name}"
    if unfit := fused.fits(config, dtype):
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
        implementation, reason = PLAIN, f"tiles are for float16, and these weights are {_name(dtype)}"
    else:
        implementation, reason = TILED, f"{family.name} would rearrange plain weights at every call"
    return Choice(operator=LAYOUT, implementation=implementation, reason=reason)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rms_norm(torch_npu: Any) -> Callable[..., Tensor]:
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed: Tensor = torch_npu.npu_rms_norm(x, weight, eps)[0]
        return normed

    return rms_norm


def _lay_out_rotary(cos_BS1H: Tensor, sin_BS1H: Tensor, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The fused rotation wants one dtype for all, and the table's B equal to that of q."""

    def laid_out(table_BS1H: Tensor) -> Tensor:
        return table_BS1H.to(dtype).expand(num_rows, -1, -1, -1).contiguous()

    return laid_out(cos_BS1H), laid_out(sin_BS1H)


def _rotate(torch_npu: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def rotate(q_BSNH: Tensor, k_BSNH: Tensor, cos_BS1H: Tensor, sin_BS1H: Tensor) -> tuple[Tensor, Tensor]:
        # The kernel writes its result over q and k. Mostly those are copies made here; of a single row and token they
        # are parts of the packed projection itself, whose q, k and v share nothing and are not read again.
        q_BSNH, k_BSNH = q_BSNH.contiguous(), k_BSNH.contiguous()
        rotated: tuple[Tensor, Tensor] = torch_npu.npu_apply_rotary_pos_emb(q_BSNH, k_BSNH, cos_BS1H, sin_BS1H)
        return rotated

    return rotate


def _swiglu(torch_npu: Any) -> Callable[..., Tensor]:
    def swiglu(gate_up: Tensor) -> Tensor:
        out: Tensor = torch_npu.npu_swiglu(gate_up.contiguous())
        return out

    return swiglu


def _causal_attention(torch_npu: Any) -> Callable[..., Tensor]:
    def causal_attention(q_BNSH: Tensor, k_BNPH: Tensor, v_BNPH: Tensor, mask_B1SP: Tensor) -> Tensor:
        # A bool mask leads torch_npu to its fused attention, and it turns the mask's meaning round itself.
        return F.scaled_dot_product_attention(q_BNSH, k_BNPH, v_BNPH, attn_mask=mask_B1SP)

    return causal_attention


def _adapter_attention(torch_npu: Any) -> Callable[..., Tensor]:
    def adapter_attention(q_BNSH: Tensor, k_BNQH: Tensor, gated_v_BNQH: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q_BNSH, k_BNQH, gated_v_BNQH)

    return adapter_attention


def _store(torch_npu: Any) -> Callable[..., None]:
    def store(cache_BNPH: Tensor, positions_B: Tensor, new_BN1H: Tensor) -> None:
        torch_npu.scatter_update_(cache_BNPH, positions_B, new_BN1H, -2)

    return store


def _any_model(config: DecoderConfig, dtype: torch.dtype) -> str:
    return ""


def _norm_fits(config: DecoderConfig, dtype: torch.dtype) -> str:
    num_bytes = config.dim * dtype.itemsize
    return "" if num_bytes >= 32 else f"wants rows of at least 32 bytes, and these have {num_bytes}"


def _rotary_fits(config: DecoderConfig, dtype: torch.dtype) -> str:
    return "" if config.head_dim in (64, 128) else f"wants heads of size 64 or 128, and these have {config.head_dim}"


def _swiglu_fits(config: DecoderConfig, dtype: torch.dtype) -> str:
    width = 2 * config.ffn_dim
    return "" if width % 32 == 0 else f"wants a width that 32 divides, and this one is {width}"


def _attention_fits(config: DecoderConfig, dtype: torch.dtype) -> str:
    return "" if config.head_dim <= 512 else f"wants heads of size 512 at most, and these have {config.head_dim}"


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
        build=_rms_norm,
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
        build=_swiglu,
    ),
    FusedOperator(
        operator="causal_attention",
        implementation="scaled_dot_product_attention",
        needs="",
        dtypes=_FUSED_ATTENTION,
        fits=_attention_fits,
        build=_causal_attention,
    ),
    FusedOperator(
        operator="adapter_attention",
        implementation="scaled_dot_product_attention",
        needs="",
        dtypes=_FUSED_ATTENTION,
        fits=_attention_fits,
        build=_adapter_attention,
    ),
    FusedOperator(
        operator="store",
        implementation="scatter_update_",
        needs="scatter_update_",
        dtypes={"910": _OLD, "A2": _ALL, "A3": _ALL, "950": _ALL},
        fits=_any_model,
        build=_store,
    ),
)
