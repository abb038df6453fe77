"""AdamW with decoupled weight decay (Loshchilov and Hutter, 2019) over named parameters, and its state by name."""

from collections.abc import Collection, Mapping
from typing import Final

import torch
from torch import Tensor, nn

BETAS: Final = (0.9, 0.98)
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


class NamedAdamW:
    """AdamW in two groups: parameters that decay, and those in `no_decay`."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], *, no_decay: Collection[str], weight_decay: float
    ) -> None:
        self._parameters = dict(parameters)
        decaying = [one for name, one in self._parameters.items() if name not in no_decay]
        others = [one for name, one in self._parameters.items() if name in no_decay]
        groups = [
            {"params": group, "weight_decay": decay}
            for group, decay in ((decaying, weight_decay), (others, 0.0))
            if group
        ]
        self.torch = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=1e-8)

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of all groups."""
        for group in self.torch.param_groups:
            group["lr"] = lr

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.torch.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts by name; empty before the first step. The tensors are the optimiser's own."""
        return {
            f"{kind}/{name}": self.torch.state[parameter][kind]
            for name, parameter in self._parameters.items()
            if parameter in self.torch.state
            for kind in (*_MOMENTS, "step")
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave. Raises KeyError for a parameter that it lacks."""
        if not state:
            return
        for name, parameter in self._parameters.items():
            own = {kind: state[f"{kind}/{name}"].to(parameter.device).clone() for kind in _MOMENTS}
            self.torch.state[parameter] = {"step": state[f"step/{name}"].clone(), **own}
