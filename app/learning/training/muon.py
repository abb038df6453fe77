"""The optimiser Muon, for matrices inside transformer blocks.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). torch's own computes in bfloat16, which
most CPUs emulate.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

# R rows, C columns
_MOMENTUM, _STEPS = 0.95, 5


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are orthogonalised, and scaled to the size of AdamW's, so that rates are comparable."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], *, weight_decay: float, dtype: torch.dtype = torch.float32
    ) -> None:
        """Updates are orthogonalised in `dtype`."""
        super().__init__([{"params": list(matrices)}], {"lr": 0.0, "weight_decay": weight_decay})
        self._dtype = dtype

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
