"""The decoder's operators for training: those of `runtime.operators`, with backward passes that keep few tensors.

Autograd would keep float32 intermediate results. Here they are computed again from the inputs, which have the type
of the weights.
"""

# H head size

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from llama_adapter.llm.training.rows import row_kernels
from llama_adapter.runtime.operators import ATEN, Operators


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.eps = eps
        if (kernels := row_kernels(x)) is not None:
            x = x.contiguous()
            inverse = torch.empty(*x.shape[:-1], 1)
            ctx.save_for_backward(x, weight, inverse)
            return kernels.rms_norm(x, None, weight, inverse, eps)
        x_float = x.float()
        inverse = torch.rsqrt(x_float.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse)
        return (x_float * inverse * weight.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        grad_x = grad_weight = None
        kernels = row_kernels(x)
        if ctx.needs_input_grad[0] and kernels is not None:
            grad_x = kernels.rms_norm(x, grad.contiguous(), weight, inverse, ctx.eps)
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


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        if (kernels := row_kernels(gate_up)) is not None:
            gate_up = gate_up.contiguous()
            ctx.save_for_backward(gate_up)
            return kernels.swiglu(gate_up, None)
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        if (kernels := row_kernels(gate_up)) is not None:
            return kernels.swiglu(gate_up, grad.contiguous())
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


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


def _swiglu(gate_up: Tensor) -> Tensor:
    activated: Tensor = _SwiGlu.apply(gate_up)  # type: ignore[no-untyped-call]
    return activated


# Attention of packed rows is in `attention.py`.
TRAINING: Operators = dataclasses.replace(ATEN, name="training", rms_norm=_rms_norm, swiglu=_swiglu)
