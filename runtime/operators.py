"""The decoder's operators in plain torch, and the table in which a device replaces some of them. All are stateless."""

# B rows, S step tokens, P positions attended to, Q adapter queries, N heads, G heads of keys and values, H head size,
# F feed-forward width, M queries that read one head of keys: those of N / G heads at S places

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Given = ParamSpec("Given")
Result = TypeVar("Result")
StoreFunction = Callable[[Tensor, Tensor, Tensor], None]


class DecoderSizes(Protocol):
    """The sizes of a decoder that a device needs to choose operators for it."""

    @property
    def dim(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def ffn_dim(self) -> int: ...

    @property
    def qk_norm(self) -> str: ...  # "head" if each head of q and k is normalised


def without_autocast(kind: str) -> AbstractContextManager[object]:
    """A block without the autocast of the program that calls, on devices of a kind such as "cuda"."""
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if is_cast else nullcontext()


def undisturbed(method: Callable[Concatenate[Any, Given], Result]) -> Callable[Concatenate[Any, Given], Result]:
    """A method of an object with `_device` in inference mode, without the autocast of the program that calls it."""

    @wraps(method)
    def run(self: Any, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        with torch.inference_mode(), without_autocast(self._device.type):
            return method(self, *args, **kwargs)

    return run


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


def geglu(gate_up: Tensor) -> Tensor:
    """As `swiglu`, with the tanh approximation of GELU (Hendrycks & Gimpel, 2016) in place of silu."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def causal_attention(q_BNSH: Tensor, k_BGPH: Tensor, v_BGPH: Tensor, mask_B1SP: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(H)) v over the positions where the mask is True; the softmax is in float32.

    Query head n reads head n // (N / G) of the keys and values.
    """
    return capped_attention(q_BNSH, k_BGPH, v_BGPH, mask_B1SP, cap=0.0)


def adapter_attention(q_BNSH: Tensor, k_BNQH: Tensor, gated_v_BNQH: Tensor) -> Tensor:
    """A separate softmax over the adapter's Q tokens, without a mask. The values already contain the gate."""
    return capped_attention(q_BNSH, k_BNQH, gated_v_BNQH, None, cap=0.0)


def capped_attention(q_BNSH: Tensor, k_BGPH: Tensor, v_BGPH: Tensor, mask_B1SP: Tensor | None, *, cap: float) -> Tensor:
    """As `causal_attention`, or as `adapter_attention` without a mask, of scores cap * tanh(score / cap).

    Cap 0 leaves the scores as they are. Gemma 2 caps them (Gemma Team, 2024).
    """
    q_BGMH, mask_B1MP = _by_key_heads(q_BNSH, k_BGPH, mask_B1SP)
    scores_BGMP = (q_BGMH @ k_BGPH.transpose(-1, -2)).float() * q_BNSH.shape[-1] ** -0.5
    scores_BGMP = capped(scores_BGMP, cap)
    if mask_B1MP is not None:
        # A finite value, because some chips saturate and have no infinity. Its softmax is exactly 0, too.
        scores_BGMP = scores_BGMP.masked_fill(~mask_B1MP, torch.finfo(torch.float32).min)
    heads_BGMH: Tensor = scores_BGMP.softmax(dim=-1).to(v_BGPH.dtype) @ v_BGPH
    return heads_BGMH if q_BGMH is q_BNSH else heads_BGMH.reshape(q_BNSH.shape)


def capped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap); x itself if `cap` is 0."""
    return (x / cap).tanh() * cap if cap else x


def _by_key_heads(q_BNSH: Tensor, k_BGPH: Tensor, mask_B1SP: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Queries and mask in the order in which the queries of one head of keys are neighbours: no key is copied."""
    num_rows, num_heads, num_tokens, head_dim = q_BNSH.shape
    group = num_heads // k_BGPH.shape[1]
    if group == 1:
        return q_BNSH, mask_B1SP
    if mask_B1SP is not None and num_tokens > 1:  # with one token, the mask is broadcast
        mask_B1SP = mask_B1SP.repeat(1, 1, group, 1)
    return q_BNSH.reshape(num_rows, -1, group * num_tokens, head_dim), mask_B1SP


def fused_causal_attention(q_BNSH: Tensor, k_BGPH: Tensor, v_BGPH: Tensor, mask_B1SP: Tensor | None) -> Tensor:
    """`causal_attention` by torch's fused kernel, without S x P scores in memory.

    Without a mask, each of S tokens attends to itself and earlier ones. P is S then.
    """
    if mask_B1SP is None:
        group = q_BNSH.shape[1] // k_BGPH.shape[1]
        if group > 1:  # not every kernel of torch lets query heads share keys
            k_BGPH, v_BGPH = (part.repeat_interleave(group, dim=1) for part in (k_BGPH, v_BGPH))
        return F.scaled_dot_product_attention(q_BNSH, k_BGPH, v_BGPH, is_causal=True)
    q_BGMH, mask_B1MP = _by_key_heads(q_BNSH, k_BGPH, mask_B1SP)
    if mask_B1MP is not None and mask_B1MP.shape[2] < q_BGMH.shape[2]:
        mask_B1MP = mask_B1MP.expand(-1, -1, q_BGMH.shape[2], -1)
    heads_BGMH = F.scaled_dot_product_attention(q_BGMH, k_BGPH, v_BGPH, attn_mask=mask_B1MP)
    return heads_BGMH if q_BGMH is q_BNSH else heads_BGMH.reshape(q_BNSH.shape)


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

    def weights(self, linear: nn.Module) -> Any:
        """The weights of a prepared linear layer as these operators read them; None if they cannot."""

    def embed(self, tokens_R: Tensor, table_VD: Tensor) -> Hidden:
        """The embeddings of tokens."""

    def project(
        self,
        hidden: Hidden,
        weights: Any,
        *,
        norm: Tensor | None,
        eps: float,
        activation: str = "",
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The linear layer of the hidden states, normalised first if there is a norm, (R, N).

        With `activation`, then `swiglu` (silu) or `geglu` (gelu_tanh) of that.
        """

    def add(
        self, residual_RD: Tensor, x_RK: Tensor, weights: Any, *, norm: Tensor | None = None, eps: float = 0.0
    ) -> Hidden:
        """The residual plus the linear layer of x, which is normalised before the addition if there is a norm."""

    def attend(
        self,
        qkv: Tensor,
        table: tuple[Tensor, Tensor] | None,
        cache: tuple[Tensor, Tensor],
        table_RT: Tensor | None,
        positions_R: Tensor,
        prefix: tuple[Tensor, Tensor] | None,
        *,
        norms: tuple[Tensor, Tensor] | None = None,
        eps: float = 0.0,
        cap: float = 0.0,
        window: int = 0,
    ) -> Tensor:
        """Rotate q and k, write k and v into the cache, and attend to the row's places and its prefix.

        qkv is (R, (N + 2 G) H), the table cos and sin (positions, H), the cache k and v (R, G, places, H), the prefix k
        and gated v (R, N, Q, H). Returns (R, N H). With `table_RT`, the cache is (blocks, G, places, H), and the table
        has the blocks of each row, int64. A block has a multiple of 64 places.

        Without a table nothing is rotated. `norms` are of q and k, before the rotation: (H,), of each head, or of all
        heads together. Scores are capped as by `capped`. With a window above 0, a token sees so many places, its own
        included.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Operators:
    """The operators that a decoder uses. The function of the same name in this file documents each operator."""

    name: str  # for reports
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    lay_out_rotary: Callable[[Tensor, Tensor, int, torch.dtype], tuple[Tensor, Tensor]]
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    swiglu: Callable[[Tensor], Tensor]
    geglu: Callable[[Tensor], Tensor]
    causal_attention: Callable[[Tensor, Tensor, Tensor, Any], Tensor]
    adapter_attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    store: StoreFunction
    knows_causal: bool = False  # `causal_attention` also takes None; see `fused_causal_attention`
    step: StepOperators | None = None
    note: str = ""  # for the user, if better operators should be there and are not


ATEN = Operators(
    name="aten",
    rms_norm=rms_norm,
    lay_out_rotary=lay_out_rotary,
    rotate=rotate,
    swiglu=swiglu,
    geglu=geglu,
    causal_attention=causal_attention,
    adapter_attention=adapter_attention,
    store=store,
)
