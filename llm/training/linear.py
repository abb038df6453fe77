"""A linear layer with a frozen weight, a bias and low-rank updates."""

# P parts along the rows of a weight, each with O outputs; I inputs, T tokens, R rank, M biased outputs

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from llama_adapter.llm.training.frozen import FrozenWeight, times, times_back


class AdaptedLinear(nn.Module):
    """y = W x + b + L2 (L1 x), with a frozen W of several parts, such as wq, wk and wv, each with its own L1 and L2.

    LoRA (Hu et al., 2022) with scale 1, as in LLaMA-Adapter V2. Factors of all parts are stacked: `lora_in` (P R, I),
    `lora_out` (P, O, R). The bias covers the first M outputs; in a layer of wq, wk and wv these are the outputs of wq.
    `weight` has the type of the activations. Bias and factors are float32 if they are trained.
    """

    weight: FrozenWeight

    def __init__(self, weight: FrozenWeight, *, bias: Tensor | None, lora: tuple[Tensor, Tensor] | None) -> None:
        """`lora` is (`lora_in`, `lora_out`). No parameter is trained until `requires_grad_` is called."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False) if isinstance(weight, Tensor) else weight
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.lora_in: nn.Parameter | None = None
        self.lora_out: nn.Parameter | None = None
        if lora is not None:
            self.lora_in, self.lora_out = (nn.Parameter(one, requires_grad=False) for one in lora)

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., P O), in the type of the weight."""
        out: Tensor = _Adapted.apply(x, self.weight, self.bias, self.lora_in, self.lora_out)  # type: ignore[no-untyped-call]
        return out

    def bare(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., 2 O): only the last two of three parts, without bias and low-rank updates."""
        rows, x = len(self.weight) // 3, x.to(self.weight.dtype)
        if isinstance(self.weight, Tensor):
            return F.linear(x, self.weight[rows:])
        whole: Tensor = _Adapted.apply(x, self.weight, None, None, None)  # type: ignore[no-untyped-call]
        return whole[..., rows:]


def new_factors(inputs: int, outputs: int, *, parts: int, rank: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """As in the reference, `lora_in` initialised as torch's linear layers, and `lora_out` of zeros; both float32."""
    bound = 1 / math.sqrt(inputs)
    factors = torch.empty(parts * rank, inputs).uniform_(-bound, bound, generator=random)
    return factors, torch.zeros(parts, outputs, rank)


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: FrozenWeight,
        bias: Tensor | None,
        lora_in: Tensor | None,
        lora_out: Tensor | None,
    ) -> Tensor:
        x_TI = x.flatten(0, -2)
        padded = None
        if bias is not None:
            padded = F.pad(bias.to(weight.dtype), (0, len(weight) - len(bias)))
        out = times(x_TI, weight, padded)
        low_TR = None
        if lora_in is not None and lora_out is not None:
            low_TR = x_TI @ lora_in.to(weight.dtype).T
            for part, low, factor in _parts(out, low_TR, lora_out):
                part.addmm_(low, factor.to(weight.dtype).T)
        needs = ctx.needs_input_grad
        plain, ctx.packed = (weight, None) if isinstance(weight, Tensor) else (None, weight)
        ctx.save_for_backward(plain, lora_in, lora_out, x_TI if needs[3] else None, low_TR if needs[4] else None)
        ctx.num_biased = None if bias is None else len(bias)
        return out.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plain, lora_in, lora_out, x_TI, low_TR = ctx.saved_tensors
        needs_x, _, needs_bias, needs_in, needs_out = ctx.needs_input_grad
        grad_TO = grad.flatten(0, -2)
        grad_x = grad_bias = grad_in = grad_out = None
        if needs_bias:
            grad_bias = grad_TO[:, : ctx.num_biased].sum(0, dtype=torch.float32)
        if needs_x:
            grad_x = times_back(grad_TO, ctx.packed or plain)
        if lora_in is not None and (needs_x or needs_in or needs_out):
            grad_low = grad_TO.new_empty(len(grad_TO), len(lora_in))
            if needs_out:
                grad_out = torch.empty_like(lora_out)
            for part, (grads, low, factor) in enumerate(_parts(grad_TO, grad_low, lora_out)):
                low.copy_(grads @ factor.to(grad.dtype))
                if grad_out is not None:
                    first = part * lora_out.shape[2]
                    # In float32, `grads.T @ low` takes torch twice as long.
                    grad_out[part] = (low_TR[:, first : first + lora_out.shape[2]].T @ grads).T
            if grad_x is not None:
                grad_x.addmm_(grad_low, lora_in.to(grad.dtype))
            if needs_in:
                grad_in = (grad_low.T @ x_TI).to(lora_in.dtype)
        if grad_x is not None:
            grad_x = grad_x.view(*grad.shape[:-1], grad_x.shape[1])
        return grad_x, None, grad_bias, grad_in, grad_out


def _parts(out_TO: Tensor, low_TR: Tensor, lora_out: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Outputs, low-rank inputs and factors of each part, as views."""
    return list(zip(out_TO.chunk(len(lora_out), 1), low_TR.chunk(len(lora_out), 1), lora_out.unbind(), strict=True))
