"""The decoder's operators for NVIDIA GPUs: torch's fused attention and norm, and a rotation of few kernels.

Each does what the plain operator of its name in `runtime/operators/base.py` does. All of it is plain torch, so tests
compare both on any device.
"""

# B rows, S step tokens, P positions attended to, Q adapter queries, N heads, H head size

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from llama_adapter.runtime.operators.base import ATEN


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One kernel, which computes in float32 inside."""
    return F.rms_norm(x, weight.shape, weight, eps)


def lay_out_rotary(cos_BS1H: Tensor, sin_BS1H: Tensor, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sign of the turned half goes into the sines, once for all layers."""
    first, second = sin_BS1H.chunk(2, dim=-1)
    return cos_BS1H, torch.cat([-first, second], dim=-1)


def rotate(q_BSNH: Tensor, k_BSNH: Tensor, cos_BS1H: Tensor, sin_BS1H: Tensor) -> tuple[Tensor, Tensor]:
    """In float32, into which the tables promote half types."""
    return _rotate(q_BSNH, cos_BS1H, sin_BS1H), _rotate(k_BSNH, cos_BS1H, sin_BS1H)


def _rotate(x_BSNH: Tensor, cos_BS1H: Tensor, signed_sin_BS1H: Tensor) -> Tensor:
    turned = x_BSNH.roll(x_BSNH.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BSNH * cos_BS1H, turned.to(cos_BS1H.dtype), signed_sin_BS1H).to(x_BSNH.dtype)


def causal_attention(q_BNSH: Tensor, k_BNPH: Tensor, v_BNPH: Tensor, mask_B1SP: Tensor) -> Tensor:
    """One kernel; no scores of S x P lie in memory."""
    return F.scaled_dot_product_attention(q_BNSH, k_BNPH, v_BNPH, attn_mask=mask_B1SP)


def adapter_attention(q_BNSH: Tensor, k_BNQH: Tensor, gated_v_BNQH: Tensor) -> Tensor:
    """As above, unmasked."""
    return F.scaled_dot_product_attention(q_BNSH, k_BNQH, gated_v_BNQH)


FUSED = dataclasses.replace(
    ATEN,
    name="sdpa",
    rms_norm=rms_norm,
    lay_out_rotary=lay_out_rotary,
    rotate=rotate,
    causal_attention=causal_attention,
    adapter_attention=adapter_attention,
)
