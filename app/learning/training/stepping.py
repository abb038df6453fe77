"""One step of the optimiser: gradients of all parts and ranks, a check that they are finite, and the update.

Muon is of Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). torch's own computes in
bfloat16, which most CPUs emulate.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from llama_adapter.app.learning.training.batches import Microbatch
from llama_adapter.app.learning.training.ranks import Distributed, OneRank, like, norm_of

# B rows of a batch; R rows, C columns of a matrix
BETAS: Final = (0.9, 0.98)
STEP = "step/"  # prefix of names in the state


class NamedOptimiser:
    """An optimiser of torch over named parameters, and its state by kind and name, such as `exp_avg/queries`."""

    def __init__(
        self, optimiser: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], *, kinds: Sequence[str]
    ) -> None:
        """`kinds` are the tensors of a parameter's state after a step: `step`, and others of the parameter's shape."""
        self.torch, self._parameters, self._kinds = optimiser, dict(parameters), kinds

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of all groups, times the `factor` of a group that has one."""
        for group in self.torch.param_groups:
            group["lr"] = lr * group.get("factor", 1.0)

    def zero_grad(self) -> None:
        """Delete all gradients."""
        self.torch.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts by name; empty before the first step. The tensors are not copies."""
        return {
            f"{kind}/{name}": self.torch.state[parameter][kind]
            for name, parameter in self._parameters.items()
            if parameter in self.torch.state
            for kind in self._kinds
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the state after a step."""
        named = [(kind, name) for kind in self._kinds for name in self._parameters]
        return {f"{kind}/{name}": () if kind == "step" else tuple(self._parameters[name].shape) for kind, name in named}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Set the state to whole tensors with the names and shapes of `shapes`, in float32."""
        for name, parameter in self._parameters.items():
            own = {kind: state[f"{kind}/{name}"].clone() for kind in self._kinds}
            self.torch.state[parameter] = {
                kind: one if kind == "step" else like(one, parameter) for kind, one in own.items()
            }


class NamedAdamW(NamedOptimiser):
    """AdamW (Loshchilov and Hutter, 2019), with groups by weight decay and by factor on the learning rate."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        no_decay: Collection[str],
        weight_decay: float,
        factor_of: Callable[[str], float] = lambda name: 1.0,
    ) -> None:
        """`no_decay` has the names without weight decay. `factor_of` maps a name to its factor on the learning rate."""
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in parameters.items():
            key = (0.0 if name in no_decay else weight_decay, factor_of(name))
            groups.setdefault(key, []).append(parameter)
        optimiser = torch.optim.AdamW(
            [{"params": group, "weight_decay": decay, "factor": factor} for (decay, factor), group in groups.items()],
            lr=0.0,
            betas=BETAS,
            eps=1e-8,
            fused=_is_on_cpu(parameters.values()) or None,
        )
        super().__init__(optimiser, parameters, kinds=("exp_avg", "exp_avg_sq", "step"))


def _is_on_cpu(parameters: Iterable[Tensor]) -> bool:
    """Whether the parameters are whole tensors on the CPU. AdamW is fused there: the default makes about 20 passes."""
    return all(one.device.type == "cpu" and not hasattr(one, "full_tensor") for one in parameters)


_FIRST_SCALE: Final = 2.0**14
_LEAST_SCALE: Final = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The result of a step."""

    loss: float  # mean over the labels of all ranks
    gradient_norm: float  # before clipping
    is_done: bool  # False: the loss or a gradient was not finite, and no weight changed
    is_overflow: bool = False  # float16 only: the loss scale was too high, which is no fault of the data
    odd: tuple[str, ...] = ()  # places in the data of this rank's examples whose loss is not finite
    asked_to_end: bool = False  # whether any rank was asked to end


class Stepper:
    """Computes training steps on this rank. After each step, weights and moments are equal on all ranks."""

    def __init__(self, distributed: Distributed, optimiser: NamedAdamW, *, ranks: OneRank, clip: float) -> None:
        self._distributed, self._optimiser, self._ranks, self._clip = distributed, optimiser, ranks, clip
        self._parameters = list(distributed.model.trained().values())
        self._device = distributed.model.device
        is_half = distributed.model.dtype == torch.float16
        self.scaler = torch.amp.GradScaler(self._device.type, enabled=is_half, init_scale=_FIRST_SCALE)

    def step(self, parts: Sequence[Microbatch], *, num_labels: int, lr: float, ask_to_end: bool = False) -> Step:
        """Learn from this rank's parts of a step. `num_labels` is the number of labels over all ranks."""
        distributed = self._distributed
        loss_sum = torch.zeros((), device=self._device)
        losses: list[Tensor] = []
        for place, part in enumerate(parts):
            with distributed.accumulating(is_last=place == len(parts) - 1):
                loss, loss_B = distributed.forward(*part.inputs(self._device))
                factor = part.weight * distributed.loss_factor / max(num_labels, 1)
                self.scaler.scale(loss * factor).backward()
            losses.append(loss_B.detach())
            if part.weight:
                loss_sum += loss.detach()
        if self.scaler.is_enabled():
            self.scaler.unscale_(self._optimiser.torch)
        norm = norm_of(one.grad for one in self._parameters if one.grad is not None)
        odd = _odd_places(parts, losses)
        sums = torch.tensor([float(loss_sum), float(bool(odd)), float(ask_to_end)], dtype=torch.float64)
        total, num_odd, num_asking = self._ranks.sum(sums).tolist()
        is_finite = bool(torch.isfinite(norm)) and not num_odd
        is_overflow = self.scaler.is_enabled() and not is_finite and not num_odd and self._scale > _LEAST_SCALE
        if is_finite:
            self._update(norm, lr=lr)
        elif self.scaler.is_enabled():
            self.scaler.update(max(self._scale / 2, _LEAST_SCALE))
        self._optimiser.zero_grad()
        return Step(
            loss=total / max(num_labels, 1),
            gradient_norm=float(norm),
            is_done=is_finite,
            is_overflow=is_overflow,
            odd=odd,
            asked_to_end=bool(num_asking),
        )

    @property
    def _scale(self) -> float:
        return float(self.scaler.get_scale())

    def _update(self, norm: Tensor, *, lr: float) -> None:
        if self._clip and norm > self._clip:
            factor = float(self._clip / (norm + 1e-6))
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        self._optimiser.set_rate(lr)
        self.scaler.step(self._optimiser.torch)
        self.scaler.update()


def _odd_places(parts: Sequence[Microbatch], losses: Sequence[Tensor]) -> tuple[str, ...]:
    """Places in the data of the examples whose loss is not finite."""
    finite = torch.cat([torch.isfinite(loss_B) for loss_B in losses]).cpu().tolist()
    examples = [one for part in parts for one in part.examples]
    return tuple(one.example.place for one, is_finite in zip(examples, finite, strict=True) if not is_finite)


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
