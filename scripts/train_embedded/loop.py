"""One training loop for all stages: optimisers, schedule, checkpoints, progress, curves. It contains no models."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llama_adapter.app.learning.training.stepping import Muon

CHECKPOINT_EVERY_S = 60.0
REPORT_EVERY_S = 20.0
CURVE_EVERY = 25  # steps

Batch = TypeVar("Batch")


def fast_type() -> torch.dtype:
    """bfloat16 if the processor has instructions for it, else float32, which is eight times as fast without them."""
    has_instructions = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return torch.bfloat16 if has_instructions() else torch.float32


def autocast() -> torch.autocast:
    """Compute in `fast_type`, with float32 weights."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast_type() is torch.bfloat16)


def is_hidden(name: str, weight: Tensor) -> bool:
    """Whether a parameter is a matrix inside a transformer block."""
    return ("blocks." in name or "layers." in name) and name.endswith("weight") and weight.ndim == 2


class Optimizers:
    """AdamW, and Muon at twice its rate for the matrices inside transformer blocks."""

    def __init__(self, modules: Iterable[nn.Module], *, lr: float) -> None:
        named = [each for module in modules for each in module.named_parameters()]
        others = [weight for name, weight in named if not is_hidden(name, weight)]
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.01),
            Muon((weight for name, weight in named if is_hidden(name, weight)), weight_decay=0.01, dtype=fast_type()),
        )
        self._weights = [weight for _, weight in named]
        self._rates = (lr, 2 * lr)

    def step(self, loss: Tensor, *, scale: float) -> None:
        """Run backward and update, with all rates multiplied by `scale`."""
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([weight for weight in self._weights if weight.grad is not None], 1.0)
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[Any]:
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load_state_dict(self, states: Sequence[Any]) -> None:
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def cosine(progress: float, *, warmup: float = 0.02, floor: float = 0.02) -> float:
    """The factor on the learning rate at `progress` 0..1."""
    if progress < warmup:
        return max(progress / warmup, 0.01)
    share = (progress - warmup) / (1 - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def train(
    name: str,
    modules: dict[str, nn.Module],
    batch_at: Callable[[int], Batch],
    compute: Callable[[Batch], tuple[Tensor, dict[str, float]]],
    *,
    lr: float,
    num_steps: int,
    seed: int,
    folder: Path,
    evaluate: Callable[[], dict[str, float]] | None = None,
    evaluate_every: int = 400,
) -> None:
    """Train for `num_steps` steps; writes `name`.pt and the curve `name`.curve.jsonl into `folder`.

    `compute` returns a batch's loss and figures to report. Step n uses `batch_at(n)` and torch's random numbers, which
    depend on `seed` and n only, so a resumed run gives the same weights. Time is processor time. Raises ValueError for
    a checkpoint with another number of steps.
    """
    path, optimizers = folder / f"{name}.pt", Optimizers(modules.values(), lr=lr)
    used_before, first = 0.0, 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        if state["num_steps"] != num_steps:
            raise ValueError(
                f"{path} was begun for {state['num_steps']} steps, now {num_steps} are wanted: the rate would not fall "
                "as it should. Take the same number, or move the file away to start over"
            )
        for key, module in modules.items():
            module.load_state_dict(state["modules"][key])
        used_before, first = state["processor_s"], state["step"]
        if first == num_steps:
            _say(f"{name}: finished before")
            return
        optimizers.load_state_dict(state["optimizers"])
    curve = Curve(folder / f"{name}.curve.jsonl", num_steps=num_steps, from_step=first)
    start = last_save = last_report = time.monotonic()
    used_until_now = time.process_time()
    figures: dict[str, float] = {}
    for step in range(first, num_steps):
        torch.manual_seed(seed * 2**32 + step)
        loss, latest = compute(batch_at(step))
        optimizers.step(loss, scale=cosine(step / num_steps))
        for key, value in latest.items():
            figures[key] = value if key not in figures else 0.95 * figures[key] + 0.05 * value
        done, now = step + 1, time.monotonic()
        processor_s = used_before + time.process_time() - used_until_now
        finished = done == num_steps
        if now - last_report > REPORT_EVERY_S or finished:
            left = (now - start) / (done - first) * (num_steps - done)
            _say(f"{name}: step {done} of {num_steps}  {_shown(figures)}  {left / 60:.1f} min left")
            last_report = now
        if done % CURVE_EVERY == 0 or finished:
            curve.add(done, processor_s, figures=figures)
        if evaluate is not None and (done % evaluate_every == 0 or finished):
            scores = evaluate()
            _say(f"{name}: scores after {processor_s / 60:.1f} min  {_shown(scores)}")
            curve.add(done, processor_s, scores=scores)
        if now - last_save > CHECKPOINT_EVERY_S or finished:
            _save(path, modules, optimizers, processor_s=processor_s, step=done, num_steps=num_steps)
            last_save = time.monotonic()


class Curve:
    """Figures and scores of a stage by step, one JSON object per line; a resumed stage continues the file."""

    def __init__(self, path: Path, *, num_steps: int, from_step: int) -> None:
        self._path, self._num_steps = path, num_steps
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = path.read_text().splitlines() if path.exists() and from_step else []
        kept = [line for line in kept if json.loads(line)["step"] <= from_step]
        path.write_text("".join(f"{line}\n" for line in kept))

    def add(self, step: int, processor_s: float, **values: dict[str, float]) -> None:
        """Append `values`, named `figures` or `scores`."""
        point = {"step": step, "num_steps": self._num_steps, "processor_s": round(processor_s, 1)}
        rounded = {name: {key: round(value, 5) for key, value in each.items()} for name, each in values.items()}
        with self._path.open("a") as file:
            file.write(json.dumps(point | rounded) + "\n")


def shuffled_at(step: int, *, count: int, batch_size: int, seed: int) -> NDArray[np.int64]:
    """The examples of batch `step`: all `count` examples in a random order, then all in another order, and so on."""
    epoch, place = divmod(step, count // batch_size)
    return _order(count, seed, epoch)[place * batch_size :][:batch_size]


@lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(count)


def trained(folder: Path, stage: str, part: str) -> dict[str, Tensor]:
    """The weights of one module in a stage's checkpoint. Raises FileNotFoundError if the stage has not run."""
    weights: dict[str, Tensor] = torch.load(folder / f"{stage}.pt", weights_only=True)["modules"][part]
    return weights


def _shown(figures: dict[str, float]) -> str:
    return "  ".join(f"{key} {value:.4f}" for key, value in figures.items())


def _save(
    path: Path, modules: dict[str, nn.Module], optimizers: Optimizers, *, processor_s: float, step: int, num_steps: int
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    torch.save(
        {
            "modules": {key: module.state_dict() for key, module in modules.items()},
            "optimizers": optimizers.state_dict(),
            "processor_s": processor_s,
            "step": step,
            "num_steps": num_steps,
        },
        unfinished,
    )
    unfinished.rename(path)


def _say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)
