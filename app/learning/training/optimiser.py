"""AdamW with decoupled weight decay (Loshchilov and Hutter, 2019) over named parameters, and its state by name."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import torch
from torch import Tensor, nn

BETAS: Final = (0.9, 0.98)
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
SECOND_MOMENT, STEP = "exp_avg_sq/", "step/"  # prefixes of names in the state


class NamedAdamW:
    """AdamW with groups of parameters: with and without weight decay, and by their factor on the learning rate."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        no_decay: Collection[str],
        weight_decay: float,
        factor_of: Callable[[str], float] = lambda name: 1.0,
    ) -> None:
        """`no_decay` has the names without weight decay. `factor_of` maps a name to its factor on the learning rate."""
        self._parameters = dict(parameters)
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in self._parameters.items():
            key = (0.0 if name in no_decay else weight_decay, factor_of(name))
            groups.setdefault(key, []).append(parameter)
        self._factors = [factor for _, factor in groups]
        self.torch = torch.optim.AdamW(
            [{"params": group, "weight_decay": decay} for (decay, _), group in groups.items()],
            lr=0.0,
            betas=BETAS,
            eps=1e-8,
            fused=_is_on_cpu(self._parameters.values()) or None,
        )

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of all groups."""
        for group, factor in zip(self.torch.param_groups, self._factors, strict=True):
            group["lr"] = lr * factor

    def zero_grad(self) -> None:
        """Delete all gradients."""
        self.torch.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts by name; empty before the first step. The tensors are not copies."""
        return {
            f"{kind}/{name}": self.torch.state[parameter][kind]
            for name, parameter in self._parameters.items()
            if parameter in self.torch.state
            for kind in (*_MOMENTS, "step")
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the state after a step."""
        moments = {f"{kind}/{name}": tuple(one.shape) for kind in _MOMENTS for name, one in self._parameters.items()}
        return moments | {f"{STEP}{name}": () for name in self._parameters}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Set the state to one that has the names and shapes of `shapes`, in float32."""
        for name, parameter in self._parameters.items():
            own = {kind: state[f"{kind}/{name}"].to(parameter.device).clone() for kind in _MOMENTS}
            self.torch.state[parameter] = {"step": state[f"{STEP}{name}"].clone(), **own}


def _is_on_cpu(parameters: Iterable[Tensor]) -> bool:
    """Whether the parameters are whole tensors on the CPU. AdamW is fused there: the default makes about 20 passes."""
    return all(one.device.type == "cpu" and not hasattr(one, "full_tensor") for one in parameters)
