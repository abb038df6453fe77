"""The loss at labelled positions, computed for some positions at a time.

The head is frozen, so the gradient of the hidden states is computed in the forward pass. Memory then holds the logits
of one part of the positions only, as in Liger Kernel's fused cross entropy (Hsu et al., 2024).
"""

# L labelled positions, D model width, V vocabulary

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llama_adapter.llm.training.frozen import FrozenWeight, times, times_back

_MOST_LOGITS = 1 << 24  # in memory at once: 64 MiB in float32


def cross_entropy(hidden_LD: Tensor, head_VD: FrozenWeight, labels_L: Tensor) -> Tensor:
    """Negative log-likelihood of each label, float32 (L,). Only `hidden_LD` gets a gradient."""
    loss_L: Tensor = _CrossEntropy.apply(hidden_LD, head_VD, labels_L)  # type: ignore[no-untyped-call]
    return loss_L


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_LD: Tensor, head_VD: FrozenWeight, labels_L: Tensor) -> Tensor:
        losses, gradients = [], []
        for first in range(0, len(hidden_LD), max(1, _MOST_LOGITS // len(head_VD))):
            places = slice(first, first + max(1, _MOST_LOGITS // len(head_VD)))
            labels_K1 = labels_L[places, None]
            logs_KV = times(hidden_LD[places], head_VD).log_softmax(1, dtype=torch.float32)
            losses.append(logs_KV.gather(1, labels_K1).neg().squeeze(1))
            if ctx.needs_input_grad[0]:
                error_KV = logs_KV.exp_()
                error_KV.scatter_add_(1, labels_K1, torch.full_like(losses[-1], -1.0)[:, None])
                gradients.append(times_back(error_KV.to(head_VD.dtype), head_VD))
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(torch.cat(gradients) if gradients else torch.zeros_like(hidden_LD))
        return torch.cat(losses) if losses else hidden_LD.new_zeros(0, dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_L: Tensor) -> tuple[Tensor, None, None]:
        (gradient_LD,) = ctx.saved_tensors
        return (gradient_LD * grad_L[:, None]).to(gradient_LD.dtype), None, None
