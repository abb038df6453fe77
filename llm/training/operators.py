"""The decoder's operators for training: those of `runtime.operators`, with backward passes that keep few tensors.

Autograd would keep float32 intermediate results. Here they are computed again from the inputs, which have the type
of the weights.
"""

# H head size, L labelled positions, K of them that are computed at once, D model width, V vocabulary

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from llama_adapter.llm.training.frozen import FrozenWeight, times, times_back
from llama_adapter.runtime.kernels.library import KINDS, Library, find_library
from llama_adapter.runtime.kernels.threads import num_threads
from llama_adapter.runtime.operators import ATEN, Operators, capped, geglu
from llama_adapter.runtime.schemes.scheme import dtype_name

_TYPES = (torch.float32, torch.bfloat16)


def _kernels(x: Tensor) -> Library | None:
    """The kernels if they support the type and the device of `x`, else None."""
    return find_library().library if x.is_cpu and x.dtype in _TYPES else None


def row_swiglu(kernels: Library, gate_up: Tensor, grad: Tensor | None) -> Tensor:
    """(..., 2 F) -> (..., F): silu of the first half times the second. Backward: the gradient of `gate_up`.

    Forward if `grad` is None, else backward. `gate_up` and `grad` must be contiguous and have the same dtype.
    """
    width = gate_up.shape[-1] // 2
    out = torch.empty_like(gate_up) if grad is not None else gate_up.new_empty(*gate_up.shape[:-1], width)
    addresses = (gate_up.data_ptr(), _address(grad), out.data_ptr())
    kernels.swiglu(KINDS[dtype_name(gate_up.dtype)], gate_up.shape[:-1].numel(), width, *addresses, num_threads())
    return out


def row_rms_norm(
    kernels: Library, x: Tensor, grad: Tensor | None, weight: Tensor, inverse: Tensor, eps: float
) -> Tensor:
    """(..., D) -> (..., D): the norm. Backward: the gradient of x.

    Forward if `grad` is None, else backward. `x` and `grad` must be contiguous and have the same dtype. `inverse`,
    float32 (..., 1), is written by the forward pass and read by the backward pass.
    """
    out, weight = torch.empty_like(x), weight.detach().float().contiguous()
    addresses = (x.data_ptr(), _address(grad), weight.data_ptr(), inverse.data_ptr(), out.data_ptr())
    kernels.rms_norm(KINDS[dtype_name(x.dtype)], inverse.numel(), x.shape[-1], eps, *addresses, num_threads())
    return out


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.eps = eps
        if (kernels := _kernels(x)) is not None:
            x = x.contiguous()
            inverse = torch.empty(*x.shape[:-1], 1)
            ctx.save_for_backward(x, weight, inverse)
            return row_rms_norm(kernels, x, None, weight, inverse, eps)
        x_float = x.float()
        inverse = torch.rsqrt(x_float.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse)
        return (x_float * inverse * weight.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        grad_x = grad_weight = None
        kernels = _kernels(x)
        if ctx.needs_input_grad[0] and kernels is not None:
            grad_x = row_rms_norm(kernels, x, grad.contiguous(), weight, inverse, ctx.eps)
            if not ctx.needs_input_grad[1]:
                return grad_x, None, None
        grad_float, normalised = grad.float(), x.float() * inverse
        if ctx.needs_input_grad[1]:
            grad_weight = (grad_float * normalised).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0] and grad_x is None:
            scaled = grad_float * weight.float()
            along = (scaled * normalised).mean(-1, keepdim=True)
            grad_x = scaled.sub_(normalised.mul_(along)).mul_(inverse).to(x.dtype)
        return grad_x, grad_weight, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, -sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x_float, half = x.float(), x.shape[-1] // 2
    sin = sin[..., :half]  # both halves of the table are equal
    turned = x_float * cos
    turned[..., :half].addcmul_(x_float[..., half:], sin, value=-1)
    turned[..., half:].addcmul_(x_float[..., :half], sin)
    return turned.to(x.dtype)


class _GeGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return geglu(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gate, up = ctx.saved_tensors[0].chunk(2, dim=-1)
        grad_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
        return torch.cat([grad_gate, F.gelu(gate, approximate="tanh") * grad], dim=-1)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        if (kernels := _kernels(gate_up)) is not None:
            gate_up = gate_up.contiguous()
            ctx.save_for_backward(gate_up)
            return row_swiglu(kernels, gate_up, None)
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        if (kernels := _kernels(gate_up)) is not None:
            return row_swiglu(kernels, gate_up, grad.contiguous())
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=grad_up)
        torch.ops.aten.silu_backward(grad * up, gate, grad_input=grad_gate)
        return grad_gate_up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of queries or keys (..., H) with a float32 table that is broadcast; computed in float32."""
    turned: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return turned


# Attention of packed rows is in `attention.py`.
TRAINING: Operators = dataclasses.replace(
    ATEN, name="training", rms_norm=_RmsNorm.apply, swiglu=_SwiGlu.apply, geglu=_GeGlu.apply
)


_MOST_LOGITS = 1 << 24  # in memory at once: 64 MiB in float32


def cross_entropy(hidden_LD: Tensor, head_VD: FrozenWeight, labels_L: Tensor, *, cap: float = 0.0) -> Tensor:
    """Negative log-likelihood of each label, float32 (L,), with logits limited by `capped`.

    Only `hidden_LD` gets a gradient.
    """
    loss_L: Tensor = _CrossEntropy.apply(hidden_LD, head_VD, labels_L, cap)  # type: ignore[no-untyped-call]
    return loss_L


class _CrossEntropy(torch.autograd.Function):
    """The head is frozen, so the gradient of the hidden states is computed in the forward pass.

    Memory then holds the logits of a part of the positions only, as in Liger Kernel (Hsu et al., 2024).
    """

    @staticmethod
    def forward(ctx: Any, hidden_LD: Tensor, head_VD: FrozenWeight, labels_L: Tensor, cap: float) -> Tensor:
        losses, gradients = [], []
        for first in range(0, len(hidden_LD), max(1, _MOST_LOGITS // len(head_VD))):
            places = slice(first, first + max(1, _MOST_LOGITS // len(head_VD)))
            labels_K1 = labels_L[places, None]
            logits_KV = times(hidden_LD[places], head_VD)
            if cap:
                logits_KV = capped(logits_KV.float(), cap)
            logs_KV = logits_KV.log_softmax(1, dtype=torch.float32)
            losses.append(logs_KV.gather(1, labels_K1).neg().squeeze(1))
            if ctx.needs_input_grad[0]:
                error_KV = logs_KV.exp_()
                error_KV.scatter_add_(1, labels_K1, torch.full_like(losses[-1], -1.0)[:, None])
                if cap:
                    error_KV.mul_(1 - (logits_KV / cap).square())
                gradients.append(times_back(error_KV.to(head_VD.dtype), head_VD))
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(torch.cat(gradients) if gradients else torch.zeros_like(hidden_LD))
        return torch.cat(losses) if losses else hidden_LD.new_zeros(0, dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_L: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient_LD,) = ctx.saved_tensors
        return (gradient_LD * grad_L[:, None]).to(gradient_LD.dtype), None, None, None
