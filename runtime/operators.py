"""The decoder's operators in plain torch, and the table in which a device replaces some of them. All are stateless."""

# B rows, S step tokens, P positions attended to, Q adapter queries, N heads, H head size, F feed-forward width

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

StoreFunction = Callable[[Tensor, Tensor, Tensor], None]


class DecoderSizes(Protocol):
    """The sizes of a decoder that a device needs to choose operators for it."""

    @property
    def dim(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def ffn_dim(self) -> int: ...


def random_parameter(*shape: int, std: float) -> nn.Parameter:
    """A parameter of normally distributed values. On the meta device, no values are drawn.

    Drawing on the meta device would import torch's compiler, which adds a second to every start.
    """
    values = torch.empty(shape)
    return nn.Parameter(values if values.is_meta else values.normal_(std=std))


class Linear(nn.Linear):
    """A linear layer that does not initialise its values on the meta device, where torch would spend time on it."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


def rotary_table(head_dim: int, *, num_positions: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i / head_dim): float32 (positions, head_dim), both halves equal."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) times the weight, in float32, then cast back (Zhang & Sennrich, 2019).

    The reference casts before it multiplies; one rounding less costs nothing and keeps half precision closer.
    """
    x_float = x.float()
    normalised = x_float * torch.rsqrt(x_float.square().mean(-1, keepdim=True) + eps)
    return (normalised * weight.float()).to(x.dtype)


def lay_out_rotary(cos_BS1H: Tensor, sin_BS1H: Tensor, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The table in the layout that `rotate` expects for q and k of `num_rows` rows in `dtype`; called once per pass.

    The inputs are float32. B is 1 if all rows have the same positions.
    """
    return cos_BS1H, sin_BS1H


def rotate(q_BSNH: Tensor, k_BSNH: Tensor, cos_BS1H: Tensor, sin_BS1H: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding (Su et al., 2021) on half-split pairs (i, i + H/2), computed in float32."""
    return _rotate(q_BSNH, cos_BS1H, sin_BS1H), _rotate(k_BSNH, cos_BS1H, sin_BS1H)


def _rotate(x_BSNH: Tensor, cos_BS1H: Tensor, sin_BS1H: Tensor) -> Tensor:
    x_float = x_BSNH.float()
    first, second = x_float.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x_float * cos_BS1H + turned * sin_BS1H).to(x_BSNH.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """(..., 2 F) -> (..., F): silu of the first half times the second (Shazeer, 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def causal_attention(q_BNSH: Tensor, k_BNPH: Tensor, v_BNPH: Tensor, mask_B1SP: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(H)) v over the positions where the mask is True; the softmax is in float32."""
    scores_BNSP = (q_BNSH @ k_BNPH.transpose(-1, -2)).float() * q_BNSH.shape[-1] ** -0.5
    # A finite value, because some chips saturate and have no infinity. Its softmax is exactly 0, too.
    scores_BNSP = scores_BNSP.masked_fill(~mask_B1SP, torch.finfo(torch.float32).min)
    heads_BNSH: Tensor = scores_BNSP.softmax(dim=-1).to(v_BNPH.dtype) @ v_BNPH
    return heads_BNSH


def adapter_attention(q_BNSH: Tensor, k_BNQH: Tensor, gated_v_BNQH: Tensor) -> Tensor:
    """A separate softmax over the adapter's Q tokens, without a mask. The values already contain the gate."""
    scores_BNSQ = (q_BNSH @ k_BNQH.transpose(-1, -2)).float() * q_BNSH.shape[-1] ** -0.5
    heads_BNSH: Tensor = scores_BNSQ.softmax(dim=-1).to(gated_v_BNQH.dtype) @ gated_v_BNQH
    return heads_BNSH


def fused_causal_attention(q_BNSH: Tensor, k_BNPH: Tensor, v_BNPH: Tensor, mask_B1SP: Tensor) -> Tensor:
    """`causal_attention` by torch's fused kernel, without S x P scores in memory."""
    return F.scaled_dot_product_attention(q_BNSH, k_BNPH, v_BNPH, attn_mask=mask_B1SP)


def fused_adapter_attention(q_BNSH: Tensor, k_BNQH: Tensor, gated_v_BNQH: Tensor) -> Tensor:
    """`adapter_attention` by torch's fused kernel."""
    return F.scaled_dot_product_attention(q_BNSH, k_BNQH, gated_v_BNQH)


def store(cache_BNPH: Tensor, positions_B: Tensor, new_BN1H: Tensor) -> None:
    """Write one token of each row into the cache, in place, at the row's position (int64)."""
    rows_B = torch.arange(len(positions_B), device=positions_B.device)
    cache_BNPH[rows_B, :, positions_B] = new_BN1H[:, :, 0]


class Hidden(NamedTuple):
    """Hidden states of one token of each row, (R, D), and float32 sums of their squares, (R, parts), for a norm.

    `sums` is None if the next operators do not read them.
    """

    x: Tensor
    sums: Tensor | None


class StepOperators(Protocol):
    """Fused operators of a decode step with few rows, for devices on which each operator costs time."""

    @property
    def most_rows(self) -> int:
        """The largest number of rows for which a step is faster with them."""
        ...

    def weights(self, linear: nn.Module) -> Any:
        """The weights of a prepared linear layer as these operators read them; None if they cannot."""
        ...

    def embed(self, tokens_R: Tensor, table_VD: Tensor) -> Hidden:
        """The embeddings of tokens."""
        ...

    def project(
        self,
        hidden: Hidden,
        weights: Any,
        *,
        norm: Tensor,
        eps: float,
        with_swiglu: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The linear layer of the normalised hidden states, (R, N); with `with_swiglu`, then `swiglu` of that."""
        ...

    def add(self, residual_RD: Tensor, x_RK: Tensor, weights: Any) -> Hidden:
        """The residual plus the linear layer of x."""
        ...

    def attend(
        self,
        qkv: Tensor,
        table: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        positions_R: Tensor,
        prefix: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Rotate q and k, write k and v into the cache, and attend to the row's places and its prefix.

        qkv is (R, 3 N H), the table cos and sin (positions, H), the cache k and v (R, N, places, H), the prefix k and
        gated v (R, N, Q, H). Returns (R, N H).
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Operators:
    """The operators that a decoder uses. The function of the same name in this file documents each operator."""

    name: str  # for reports
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    lay_out_rotary: Callable[[Tensor, Tensor, int, torch.dtype], tuple[Tensor, Tensor]]
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    swiglu: Callable[[Tensor], Tensor]
    causal_attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    adapter_attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    store: StoreFunction
    step: StepOperators | None = None
    note: str = ""  # for the user, if better operators should be there and are not


ATEN = Operators(
    name="aten",
    rms_norm=rms_norm,
    lay_out_rotary=lay_out_rotary,
    rotate=rotate,
    swiglu=swiglu,
    causal_attention=causal_attention,
    adapter_attention=adapter_attention,
    store=store,
)
