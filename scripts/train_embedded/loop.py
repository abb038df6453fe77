"""One training loop for all stages: optimisers, a schedule over time, checkpoints, progress. No models here."""

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

CHECKPOINT_EVERY_S = 60.0
REPORT_EVERY_S = 20.0

Batch = TypeVar("Batch")


class Optimizers:
    """Muon on the hidden matrices, AdamW on everything else (embeddings, heads, norms, biases)."""

    def __init__(
        self,
        modules: Sequence[tuple[nn.Module, float]],
        *,
        lr: float,
        muon_factor: float = 2.0,
        is_hidden: Callable[[str], bool],
    ) -> None:
        """`modules` come with a factor on the rate each; `is_hidden` says by name which matrices Muon takes."""
        hidden, rest = [], []
        for module, factor in modules:
            named = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
            muon = [weight for name, weight in named if weight.ndim == 2 and is_hidden(name)]
            other = [weight for name, weight in named if not (weight.ndim == 2 and is_hidden(name))]
            if muon:
                hidden.append({"params": muon, "lr": lr * muon_factor * factor})
            if other:
                rest.append({"params": other, "lr": lr * factor})
        self._optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, betas=(0.9, 0.98), weight_decay=0.01)]
        if hidden:
            self._optimizers.append(torch.optim.Muon(hidden, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
        self._weights = [weight for module, _ in modules for weight in module.parameters()]
        self._rates = [[float(group["lr"]) for group in each.param_groups] for each in self._optimizers]

    def step(self, loss: Tensor, *, scale: float) -> None:
        """Backward and update, with all rates multiplied by `scale`."""
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([weight for weight in self._weights if weight.grad is not None], 1.0)
        for optimizer, rates in zip(self._optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[Any]:
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load_state_dict(self, states: Sequence[Any]) -> None:
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def cosine(progress: float, *, warmup: float = 0.02, floor: float = 0.02) -> float:
    """Factor on the learning rate at `progress` 0..1."""
    if progress < warmup:
        return max(progress / warmup, 0.01)
    share = (progress - warmup) / (1 - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def train(
    name: str,
    modules: dict[str, nn.Module],
    optimizers: Optimizers,
    batches: Iterable[Batch],
    compute: Callable[[Batch], tuple[Tensor, dict[str, float]]],
    *,
    minutes: float,
    folder: Path,
    evaluate: Callable[[], dict[str, float]] | None = None,
    evaluate_every_s: float = 90.0,
) -> None:
    """Train for a budget of wall time; `compute` gives a batch's loss and figures to report. Ends with `name`.pt saved.

    The schedule follows the clock, not a number of steps, so that a busy machine ends in time with a finished
    cosine. Stopped and started again, it goes on from the last checkpoint with the time that was left.
    """
    path = folder / f"{name}.pt"
    elapsed_before, step_number = 0.0, 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        for key, module in modules.items():
            module.load_state_dict(state["modules"][key])
        if state["elapsed_s"] >= minutes * 60:
            _say(f"{name}: finished before")
            return
        optimizers.load_state_dict(state["optimizers"])
        elapsed_before, step_number = state["elapsed_s"], state["step"]
    start = last_save = last_report = last_evaluation = time.monotonic()
    figures: dict[str, float] = {}
    for batch in batches:
        now = time.monotonic()
        elapsed = elapsed_before + now - start
        finished = elapsed >= minutes * 60
        if now - last_report > REPORT_EVERY_S or finished:
            left = max(minutes * 60 - elapsed, 0)
            shown = "  ".join(f"{key} {value:.4f}" for key, value in figures.items())
            _say(f"{name}: step {step_number}  {shown}  {left / 60:.1f} min left")
            last_report = now
        if evaluate is not None and (now - last_evaluation > evaluate_every_s or finished):
            scores = "  ".join(f"{key} {value:.3f}" for key, value in evaluate().items())
            _say(f"{name}: scores after {elapsed / 60:.1f} min  {scores}")
            last_evaluation = time.monotonic()
        if now - last_save > CHECKPOINT_EVERY_S or finished:
            _save(path, modules, optimizers, elapsed_s=elapsed, step=step_number)
            last_save = now
        if finished:
            return
        loss, latest = compute(batch)
        optimizers.step(loss, scale=cosine(elapsed / (minutes * 60)))
        step_number += 1
        for key, value in latest.items():
            figures[key] = value if key not in figures else 0.95 * figures[key] + 0.05 * value


def _save(path: Path, modules: dict[str, nn.Module], optimizers: Optimizers, *, elapsed_s: float, step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    torch.save(
        {
            "modules": {key: module.state_dict() for key, module in modules.items()},
            "optimizers": optimizers.state_dict(),
            "elapsed_s": elapsed_s,
            "step": step,
        },
        unfinished,
    )
    unfinished.rename(path)


def _say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)
