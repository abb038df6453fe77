"""Operators of the decoder in plain torch: rotary embedding and the two attentions. No devices, no state."""

# B rows, S step tokens, P positions attended to, Q adapter queries, N heads, H head size

import torch
from torch import Tensor, nn


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) times the weight, in float32, then cast back (Zhang & Sennrich, 2019).

    The reference casts before it multiplies; one rounding less costs nothing and keeps half precision closer.
    """

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        x_float = x.float()
        normalised = x_float * torch.rsqrt(x_float.square().mean(-1, keepdim=True) + self.eps)
        return (normalised * self.weight.float()).to(x.dtype)


def random_parameter(*shape: int, std: float) -> nn.Parameter:
    """Normal values to train from; on the meta device, where weights are only sketched, none are drawn.

    Drawing there would import torch's compiler, a second of every start.
    """
    values = torch.empty(shape)
    return nn.Parameter(values if values.is_meta else values.normal_(std=std))


def rotary_table(head_dim: int, *, num_positions: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i / head_dim): float32 (positions, head_dim), both halves alike."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


def rotate(x_BNSH: Tensor, cos_B1SH: Tensor, sin_B1SH: Tensor) -> Tensor:
    """Rotary embedding (Su et al., 2021) on half-split pairs (i, i + H/2), computed in float32."""
    x_float = x_BNSH.float()
    first, second = x_float.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x_float * cos_B1SH + turned * sin_B1SH).to(x_BNSH.dtype)


def causal_attention(q_BNSH: Tensor, k_BNPH: Tensor, v_BNPH: Tensor, mask_B1SP: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(H)) v over the places where the mask is True; the softmax is in float32."""
    scores_BNSP = (q_BNSH @ k_BNPH.transpose(-1, -2)).float() * q_BNSH.shape[-1] ** -0.5
    scores_BNSP = scores_BNSP.masked_fill(~mask_B1SP, float("-inf"))
    heads_BNSH: Tensor = scores_BNSP.softmax(dim=-1).to(v_BNPH.dtype) @ v_BNPH
    return heads_BNSH


def adapter_attention(q_BNSH: Tensor, k_BNQH: Tensor, gated_v_BNQH: Tensor) -> Tensor:
    """The adapter's own softmax over its Q tokens, unmasked; the gate is already inside the values."""
    scores_BNSQ = (q_BNSH @ k_BNQH.transpose(-1, -2)).float() * q_BNSH.shape[-1] ** -0.5
    heads_BNSH: Tensor = scores_BNSQ.softmax(dim=-1).to(gated_v_BNQH.dtype) @ gated_v_BNQH
    return heads_BNSH
