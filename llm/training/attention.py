"""Attention of packed rows: causal attention within a row, and attention to the adapter's tokens of its picture."""

# B rows, S places of a padded row, P places attended to, T tokens of all rows, N heads, H head size, D model width

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from llama_adapter.llm.model.llama import Attention
from llama_adapter.llm.training.layout import Layout
from llama_adapter.llm.training.operators import rotate

# Queries (B, N, S, H), keys and values (B, N, P, H), and whether attention is causal -> (B, N, S, H).
Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]

_MOST_SCORES = 1 << 22  # in memory at once on a CPU: 16 MiB in float32


def packed_attention(
    attention: Attention,
    x_TD: Tensor,
    *,
    layout: Layout,
    rotary: tuple[Tensor, Tensor],
    prefix: tuple[Tensor, Tensor] | None,
    attend: Attend,
) -> Tensor:
    """The concatenated heads, (T, N H), before the output projection.

    `rotary` is the table at the tokens' positions, float32 (T, 1, 1, H). `prefix` has keys and gated values of each
    row, (B, N, Q, H).
    """
    qk_T2NH, v_T1NH = attention.qkv(x_TD).unflatten(-1, (3, attention.num_heads, -1)).split((2, 1), dim=1)
    # Contiguous, because otherwise each product of attention would copy them.
    q_BNSH, k_BNSH = layout.pad(rotate(qk_T2NH, *rotary)).permute(2, 0, 3, 1, 4).contiguous()
    v_BNSH = layout.pad(v_T1NH.squeeze(1)).transpose(1, 2).contiguous()
    heads_BNSH = attend(q_BNSH, k_BNSH, v_BNSH, True)
    if prefix is not None:
        heads_BNSH = heads_BNSH + attend(q_BNSH, *prefix, False)
    return layout.pack(heads_BNSH.transpose(1, 2)).flatten(1)


def attend(q_BNSH: Tensor, k_BNPH: Tensor, v_BNPH: Tensor, is_causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(H)) v. The softmax is computed in float32."""
    if q_BNSH.device.type != "cpu":
        return F.scaled_dot_product_attention(q_BNSH, k_BNPH, v_BNPH, is_causal=is_causal)
    return attend_on_cpu(q_BNSH, k_BNPH, v_BNPH, is_causal)


def attend_on_cpu(q_BNSH: Tensor, k_BNPH: Tensor, v_BNPH: Tensor, is_causal: bool) -> Tensor:
    """As `attend`, on a CPU, with at most _MOST_SCORES scores in memory unless one row has more."""
    heads_BNSH: Tensor = _Attention.apply(q_BNSH, k_BNPH, v_BNPH, is_causal)  # type: ignore[no-untyped-call]
    return heads_BNSH


class _Attention(torch.autograd.Function):
    """Attention for CPUs, where torch's fused backward pass takes several times as long for rows of this length.

    The backward pass computes probabilities again, a few rows at a time.
    """

    @staticmethod
    def forward(ctx: Any, q_BNSH: Tensor, k_BNPH: Tensor, v_BNPH: Tensor, is_causal: bool) -> Tensor:
        ctx.save_for_backward(q_BNSH, k_BNPH, v_BNPH)
        ctx.is_causal = is_causal
        heads_BSNH = torch.empty_like(q_BNSH.transpose(1, 2), memory_format=torch.contiguous_format)
        heads_BNSH = heads_BSNH.transpose(1, 2)
        for rows in _parts(q_BNSH, k_BNPH):
            probabilities = _probabilities(q_BNSH[rows], k_BNPH[rows], is_causal=is_causal)
            heads_BNSH[rows] = probabilities.to(v_BNPH.dtype) @ v_BNPH[rows]
        return heads_BNSH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNSH: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_BNSH, k_BNPH, v_BNPH = ctx.saved_tensors
        grads, grad_BNSH = [], grad_BNSH.contiguous()
        for rows in _parts(q_BNSH, k_BNPH):
            q, k, v, grad = q_BNSH[rows], k_BNPH[rows], v_BNPH[rows], grad_BNSH[rows]
            p_BNSP = _probabilities(q, k, is_causal=ctx.is_causal)
            grad_v = p_BNSP.to(v.dtype).transpose(-1, -2) @ grad
            grad_p = (grad @ v.transpose(-1, -2)).float()
            grad_scores = torch._softmax_backward_data(grad_p, p_BNSP, -1, torch.float32).to(q.dtype)
            scale = q.shape[-1] ** -0.5
            grads.append(((grad_scores @ k).mul_(scale), (grad_scores.transpose(-1, -2) @ q).mul_(scale), grad_v))
        grad_q, grad_k, grad_v = (torch.cat(each) if len(each) > 1 else each[0] for each in zip(*grads, strict=True))
        return grad_q, grad_k, grad_v, None


def _probabilities(q_BNSH: Tensor, k_BNPH: Tensor, *, is_causal: bool) -> Tensor:
    """The attention probabilities, float32 (B, N, S, P)."""
    scores_BNSP, scale = q_BNSH @ k_BNPH.transpose(-1, -2), q_BNSH.shape[-1] ** -0.5
    if not is_causal:
        return scores_BNSP.float().mul_(scale).softmax(-1)
    length = q_BNSH.shape[2]
    mask_SS = torch.full((length, length), float("-inf"), device=q_BNSH.device).triu_(1)
    return torch.add(mask_SS, scores_BNSP, alpha=scale).softmax(-1)  # in float32, as the mask is


def _parts(q_BNSH: Tensor, k_BNPH: Tensor) -> list[slice]:
    """Slices of rows whose scores are computed together."""
    each = max(1, _MOST_SCORES // (q_BNSH.shape[1] * q_BNSH.shape[2] * k_BNPH.shape[2]))
    return [slice(first, first + each) for first in range(0, len(q_BNSH), each)]
