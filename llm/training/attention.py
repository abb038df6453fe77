"""Attention of packed rows: causal attention within a row, and attention to the adapter's tokens of its picture."""

# B rows, S places of a padded row, P places attended to, T tokens of all rows, N heads, G heads of keys and values,
# H head size, D model width

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from llama_adapter.llm.model.llama import Attention
from llama_adapter.llm.training.layout import Layout
from llama_adapter.llm.training.operators import rotate
from llama_adapter.runtime.operators import fused_causal_attention

_MOST_SCORES = 1 << 22  # in memory at once on a CPU: 16 MiB in float32


class Attend(Protocol):
    """Queries (B, N, S, H), keys and values (B, G, P, H) -> (B, N, S, H).

    If attention is causal, a token sees at most the last `window` tokens, its own included; 0: all. Scores become
    cap * tanh(score / cap); 0: they are not capped.
    """

    def __call__(
        self, q_BNSH: Tensor, k_BGPH: Tensor, v_BGPH: Tensor, *, is_causal: bool, window: int = 0, cap: float = 0.0
    ) -> Tensor: ...


def packed_attention(
    attention: Attention,
    x_TD: Tensor,
    *,
    layout: Layout,
    rotary: tuple[Tensor, Tensor] | None,
    window: int,
    prefix: tuple[Tensor, Tensor] | None,
    attend: Attend,
) -> Tensor:
    """The concatenated heads, (T, N H), before the output projection.

    `rotary` is the table at the tokens' positions, float32 (T, 1, H); None if the layer does not rotate. `prefix` has
    keys and gated values of each row, (B, N, Q, H).
    """
    q_TNH, k_TGH, v_TGH = attention.split(attention.qkv(x_TD))
    q_TNH, k_TGH, cap = attention.q_norm(q_TNH), attention.k_norm(k_TGH), attention.score_cap
    if rotary is not None:
        q_TNH, k_TGH = rotate(q_TNH, *rotary), rotate(k_TGH, *rotary)
    # Contiguous, because otherwise each product of attention would copy them.
    q_BNSH, k_BGSH, v_BGSH = (layout.pad(x).transpose(1, 2).contiguous() for x in (q_TNH, k_TGH, v_TGH))
    heads_BNSH = attend(q_BNSH, k_BGSH, v_BGSH, is_causal=True, window=window, cap=cap)
    if prefix is not None:
        heads_BNSH = heads_BNSH + attend(q_BNSH, *prefix, is_causal=False, cap=cap)
    return layout.pack(heads_BNSH.transpose(1, 2)).flatten(1)


def attend(
    q_BNSH: Tensor, k_BGPH: Tensor, v_BGPH: Tensor, *, is_causal: bool, window: int = 0, cap: float = 0.0
) -> Tensor:
    """softmax(q k^T / sqrt(H)) v, see `Attend`. The softmax is computed in float32."""
    if q_BNSH.device.type == "cpu" or cap:
        return attend_in_parts(q_BNSH, k_BGPH, v_BGPH, is_causal=is_causal, window=window, cap=cap)
    return attend_fused(q_BNSH, k_BGPH, v_BGPH, is_causal=is_causal, window=window)


def attend_fused(
    q_BNSH: Tensor, k_BGPH: Tensor, v_BGPH: Tensor, *, is_causal: bool, window: int = 0, cap: float = 0.0
) -> Tensor:
    """As `attend` without a cap, by torch's fused kernels."""
    if window and is_causal:
        mask_SS = torch.ones(q_BNSH.shape[2], k_BGPH.shape[2], dtype=torch.bool, device=q_BNSH.device).tril_()
        return fused_causal_attention(q_BNSH, k_BGPH, v_BGPH, mask_SS.triu_(1 - window)[None, None])
    is_grouped = q_BNSH.shape[1] > k_BGPH.shape[1]
    return F.scaled_dot_product_attention(q_BNSH, k_BGPH, v_BGPH, is_causal=is_causal, enable_gqa=is_grouped)


def attend_in_parts(
    q_BNSH: Tensor, k_BGPH: Tensor, v_BGPH: Tensor, *, is_causal: bool, window: int = 0, cap: float = 0.0
) -> Tensor:
    """As `attend`, with at most _MOST_SCORES scores in memory unless one row has more."""
    heads_BNSH: Tensor = _Attention.apply(q_BNSH, k_BGPH, v_BGPH, is_causal, window, cap)  # type: ignore[no-untyped-call]
    return heads_BNSH


class _Attention(torch.autograd.Function):
    """Attention for CPUs, where torch's fused backward pass takes several times as long for rows of this length.

    The backward pass computes probabilities again, a few rows at a time.
    """

    @staticmethod
    def forward(
        ctx: Any, q_BNSH: Tensor, k_BGPH: Tensor, v_BGPH: Tensor, is_causal: bool, window: int, cap: float
    ) -> Tensor:
        ctx.save_for_backward(q_BNSH, k_BGPH, v_BGPH)
        ctx.settings = is_causal, window, cap
        heads_BSNH = torch.empty_like(q_BNSH.transpose(1, 2), memory_format=torch.contiguous_format)
        heads_BNSH = heads_BSNH.transpose(1, 2)
        for rows in _parts(q_BNSH, k_BGPH):
            q, k, v = q_BNSH[rows], k_BGPH[rows], v_BGPH[rows]
            probabilities, _ = _probabilities(q, k, *ctx.settings)
            heads_BNSH[rows] = (_grouped(probabilities.to(v.dtype), k) @ v).view_as(q)
        return heads_BNSH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNSH: Tensor) -> tuple[Tensor | None, ...]:
        q_BNSH, k_BGPH, v_BGPH = ctx.saved_tensors
        grads, grad_BNSH = [], grad_BNSH.contiguous()
        for rows in _parts(q_BNSH, k_BGPH):
            q, k, v, grad = q_BNSH[rows], k_BGPH[rows], v_BGPH[rows], _grouped(grad_BNSH[rows], k_BGPH)
            p_BNSP, slope = _probabilities(q, k, *ctx.settings)
            grad_v = _grouped(p_BNSP.to(v.dtype), k).transpose(-1, -2) @ grad
            grad_p = (grad @ v.transpose(-1, -2)).float().view_as(p_BNSP)
            grad_scores = torch._softmax_backward_data(grad_p, p_BNSP, -1, torch.float32)
            if slope is not None:
                grad_scores.mul_(slope)
            grad_scores = _grouped(grad_scores.to(q.dtype), k)
            scale = q.shape[-1] ** -0.5
            grad_q, grad_k = grad_scores @ k, grad_scores.transpose(-1, -2) @ _grouped(q, k)
            grads.append((grad_q.mul_(scale).view_as(q), grad_k.mul_(scale), grad_v))
        grad_q, grad_k, grad_v = (torch.cat(each) if len(each) > 1 else each[0] for each in zip(*grads, strict=True))
        return grad_q, grad_k, grad_v, None, None, None


def _grouped(x_BNSx: Tensor, k_BGPH: Tensor) -> Tensor:
    """(B, N, S, ...) as (B, G, N / G * S, ...): what belongs to one head of keys and values. A view."""
    return x_BNSx.view(len(x_BNSx), k_BGPH.shape[1], -1, x_BNSx.shape[-1])


def _probabilities(
    q_BNSH: Tensor, k_BGPH: Tensor, is_causal: bool, window: int, cap: float
) -> tuple[Tensor, Tensor | None]:
    """The attention probabilities, float32 (B, N, S, P), and the slopes of the cap at the scores, if there is a cap."""
    length, num_places, scale = q_BNSH.shape[2], k_BGPH.shape[2], q_BNSH.shape[-1] ** -0.5
    scores_BNSP = (_grouped(q_BNSH, k_BGPH) @ k_BGPH.transpose(-1, -2)).view(*q_BNSH.shape[:-1], num_places)
    slope = None
    if cap:
        tanh_BNSP = scores_BNSP.float().mul_(scale / cap).tanh_()
        scores_BNSP, slope, scale = tanh_BNSP, 1 - tanh_BNSP.square(), cap
    if not is_causal:
        return scores_BNSP.float().mul_(scale).softmax(-1), slope
    mask_SS = torch.full((length, length), float("-inf"), device=q_BNSH.device).triu_(1)
    if window:
        mask_SS += torch.full_like(mask_SS, float("-inf")).tril_(-window)
    return torch.add(mask_SS, scores_BNSP, alpha=scale).softmax(-1), slope  # in float32, as the mask is


def _parts(q_BNSH: Tensor, k_BGPH: Tensor) -> list[slice]:
    """Slices of rows whose scores are computed together."""
    each = max(1, _MOST_SCORES // (q_BNSH.shape[1] * q_BNSH.shape[2] * k_BGPH.shape[2]))
    return [slice(first, first + each) for first in range(0, len(q_BNSH), each)]
