"""A linear layer with a frozen weight, a bias and low-rank updates."""

# P parts along the rows of a weight, with O outputs together; I inputs, T tokens, R rank, M outputs with a trained bias

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from llama_adapter.llm.training.frozen import FrozenWeight, times, times_back


class AdaptedLinear(nn.Module):
    """y = W x + b + L2 (L1 x), with a frozen W of several parts, such as wq, wk and wv, each with its own L1 and L2.

    LoRA (Hu et al., 2022) with scale 1, as in LLaMA-Adapter V2. Factors of all parts are stacked: `lora_in` (P R, I),
    `lora_out` (O, R). The bias covers the first M outputs; in a layer of wq, wk and wv these are the outputs of wq.
    `frozen_bias` (O,) is added to it: what the LLaMA has of its own, and the bias does not replace.
    `weight` has the type of the activations. Bias and factors are float32 if they are trained.
    """

    weight: FrozenWeight
    frozen_bias: Tensor | None

    def __init__(
        self,
        weight: FrozenWeight,
        *,
        rows: Sequence[int] = (),
        bias: Tensor | None = None,
        lora: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """`rows` are the outputs of each part, which are needed for `lora`, (`lora_in`, `lora_out`).

        No parameter is trained until `requires_grad_` is called.
        """
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False) if isinstance(weight, Tensor) else weight
        self.rows = tuple(rows)
        self.register_buffer("frozen_bias", None, persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.lora_in: nn.Parameter | None = None
        self.lora_out: nn.Parameter | None = None
        if lora is not None:
            self.lora_in, self.lora_out = (nn.Parameter(one, requires_grad=False) for one in lora)

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O), in the type of the weight."""
        return self._applied(x, self.bias, self.lora_in, self.lora_out)

    def take_bias(self, bias_O: Tensor) -> None:
        """Take the LLaMA's own bias, except for the outputs that the adapter's file has a bias for."""
        self.frozen_bias = bias_O.clone()
        if self.bias is not None:
            self.frozen_bias[: len(self.bias)] = 0

    def bare(self, x: Tensor) -> Tensor:
        """(..., I) -> the outputs of all parts but the first, without trained bias and low-rank updates."""
        first, x, frozen = self.rows[0], x.to(self.weight.dtype), self.frozen_bias
        if isinstance(self.weight, Tensor):
            return F.linear(x, self.weight[first:], None if frozen is None else frozen[first:].to(x.dtype))
        return self._applied(x, None, None, None)[..., first:]

    def _applied(self, x: Tensor, *trained: Tensor | None) -> Tensor:
        out: Tensor = _Adapted.apply(x, self.weight, self.rows, self.frozen_bias, *trained)  # type: ignore[no-untyped-call]
        return out


def new_factors(inputs: int, outputs: Sequence[int], *, rank: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """As in the reference, `lora_in` initialised as torch's linear layers, and `lora_out` of zeros; both float32.

    `outputs` are those of each part.
    """
    bound = 1 / math.sqrt(inputs)
    factors = torch.empty(len(outputs) * rank, inputs).uniform_(-bound, bound, generator=random)
    return factors, torch.zeros(sum(outputs), rank)


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: FrozenWeight,
        rows: tuple[int, ...],
        frozen_bias: Tensor | None,
        bias: Tensor | None,
        lora_in: Tensor | None,
        lora_out: Tensor | None,
    ) -> Tensor:
        x_TI = x.flatten(0, -2)
        padded = None if frozen_bias is None else frozen_bias.to(weight.dtype)
        if bias is not None:
            trained = F.pad(bias.to(weight.dtype), (0, len(weight) - len(bias)))
            padded = trained if padded is None else trained + padded
        out = times(x_TI, weight, padded)
        low_TR = None
        if lora_in is not None and lora_out is not None:
            low_TR = x_TI @ lora_in.to(weight.dtype).T
            for part, low, factor in _parts(out, low_TR, lora_out, rows):
                part.addmm_(low, factor.to(weight.dtype).T)
        needs = ctx.needs_input_grad
        plain, ctx.packed = (weight, None) if isinstance(weight, Tensor) else (None, weight)
        ctx.rows = rows
        ctx.save_for_backward(plain, lora_in, lora_out, x_TI if needs[5] else None, low_TR if needs[6] else None)
        ctx.num_biased = None if bias is None else len(bias)
        return out.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plain, lora_in, lora_out, x_TI, low_TR = ctx.saved_tensors
        needs_x, _, _, _, needs_bias, needs_in, needs_out = ctx.needs_input_grad
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
                for part, low, grads in _parts(grad_TO, low_TR, grad_out, ctx.rows):
                    grads.copy_((low.T @ part).T)  # in float32, `part.T @ low` takes torch twice as long
            for part, low, factor in _parts(grad_TO, grad_low, lora_out, ctx.rows):
                low.copy_(part @ factor.to(grad.dtype))
            if grad_x is not None:
                grad_x.addmm_(grad_low, lora_in.to(grad.dtype))
            if needs_in:
                grad_in = (grad_low.T @ x_TI).to(lora_in.dtype)
        if grad_x is not None:
            grad_x = grad_x.view(*grad.shape[:-1], grad_x.shape[1])
        return grad_x, None, None, None, grad_bias, grad_in, grad_out


def _parts(out_TO: Tensor, low: Tensor, lora_out: Tensor, rows: tuple[int, ...]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Outputs, low-rank inputs (T, R) and factors of each part, as views."""
    lows = torch.split(low, lora_out.shape[1], 1)
    return list(zip(torch.split(out_TO, list(rows), 1), lows, torch.split(lora_out, list(rows)), strict=True))
