"""The optimiser Muon, for matrices inside transformer blocks.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). torch's own computes in bfloat16, which
most CPUs emulate.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

# R rows, C columns
_BUFFER = "momentum/"  # prefix of names in the state
_MOMENTUM, _STEPS = 0.95, 5


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are orthogonalised, and scaled to the size of AdamW's, so that rates are comparable."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], *, weight_decay: float, dtype: torch.dtype = torch.float32
    ) -> None:
        """`parameters` are matrices by name. Updates are orthogonalised in `dtype`."""
        super().__init__([{"params": list(parameters.values())}], {"lr": 0.0, "weight_decay": weight_decay})
        self._named, self._dtype = dict(parameters), dtype

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the parameters that have gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                mean = state["momentum"].lerp_(weight.grad, 1 - _MOMENTUM)
                update = orthogonal(weight.grad.lerp(mean, _MOMENTUM).to(self._dtype)).to(weight.dtype)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * 0.2 * max(weight.shape) ** 0.5)

    def named_state(self) -> dict[str, Tensor]:
        """The momentum of each parameter by name; empty before the first step. The tensors are not copies."""
        found = {name: self.state[weight].get("momentum") for name, weight in self._named.items()}
        return {f"{_BUFFER}{name}": tensor for name, tensor in found.items() if tensor is not None}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of `named_state` after a step."""
        return {f"{_BUFFER}{name}": tuple(weight.shape) for name, weight in self._named.items()}

    @torch.no_grad()
    def load_named(self, state: Mapping[str, Tensor]) -> None:
        """Set the state to one with the names and shapes of `shapes`."""
        for name, weight in self._named.items():
            self.state[weight] = {"momentum": state[f"{_BUFFER}{name}"].to(weight.device).clone()}


def orthogonal(matrix_RC: Tensor) -> Tensor:
    """The nearest matrix whose singular values are about 1, by Newton-Schulz iterations."""
    is_tall = matrix_RC.shape[0] > matrix_RC.shape[1]
    x = matrix_RC.T if is_tall else matrix_RC
    x = x / x.norm().clamp(min=1e-7)
    # Every iteration multiplies x by a polynomial of its Gram matrix. These commute, so their product comes first,
    # and x, which has up to four times as many columns, is multiplied once.
    gram = x @ x.T
    factor = product = _polynomial(gram)
    for _ in range(_STEPS - 1):
        gram = factor @ gram @ factor
        factor = _polynomial(gram)
        product = factor @ product
    update: Tensor = product @ x
    return update.T if is_tall else update


def _polynomial(gram_RR: Tensor) -> Tensor:
    found = torch.addmm(gram_RR, gram_RR, gram_RR, beta=-4.7750, alpha=2.0315)
    found.diagonal().add_(3.4445)
    return found
