"""Checkpoints, from which a run resumes: weights, the optimiser's moments, and the state of the loop.

They are written atomically.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from safetensors.torch import save
from torch import Tensor

from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.files import list_keys, read_metadata, read_safetensors

LAST, BEST = "last.safetensors", "best.safetensors"
_FORMAT: Final = "llama-adapter training 1"
WEIGHT: Final = "weight/"  # prefix of the names of weights; moments have other prefixes


@dataclass(kw_only=True, slots=True)
class LoopState:
    """The progress of a run. It is also written to `last.json`, for people to read."""

    step: int = 0  # steps done, including skipped steps
    num_steps: int = 0  # of the whole run
    run: str = ""  # digest of the settings and data that the steps depend on
    best: list[float] = field(default_factory=list)  # `Validation.key` of the best weights; empty: none yet
    best_step: int = 0
    least_loss: float | None = None  # on the validation examples
    num_worse: int = 0  # evaluations in a row with neither a better key nor a smaller loss
    skipped: list[int] = field(default_factory=list)  # steps with a loss or gradient that was not finite
    elapsed_s: float = 0.0
    num_examples: int = 0  # examples learnt, counted again in every epoch
    scaler: dict[str, Any] = field(default_factory=dict)  # state of the gradient scaler, for float16

    def judge(self, key: list[float], loss: float | None) -> bool:
        """Record an evaluation at `step`; returns whether it is the best so far.

        A smaller loss counts as progress too. At first a model often gives the same answer to every question; its
        progress then shows in the loss only.
        """
        is_best, falls = not self.best or key > self.best, False
        if loss is not None and math.isfinite(loss) and (self.least_loss is None or loss < self.least_loss):
            self.least_loss, falls = loss, True
        if is_best:
            self.best, self.best_step = key, self.step
        self.num_worse = 0 if is_best or falls else self.num_worse + 1
        return is_best


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], state: LoopState) -> None:
    """Replace a checkpoint atomically: if the process is killed, the earlier checkpoint remains. Raises OSError."""
    values = json.dumps(asdict(state))
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_write(path) as file:
        file.write(save(held, metadata={"format": _FORMAT, "state": values}))
    with atomic_write(path.with_suffix(".json")) as file:
        file.write(json.dumps(asdict(state), indent=1).encode() + b"\n")


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], LoopState]:
    """Tensors and state. Raises CheckpointError if the file is missing, damaged or not a checkpoint of a training."""
    tensors, metadata = read_safetensors(path), read_metadata(path)
    try:
        if metadata.get("format") != _FORMAT:
            raise ValueError
        values = json.loads(metadata["state"])
        return tensors, LoopState(**{one.name: values[one.name] for one in fields(LoopState)})
    except (KeyError, ValueError):
        raise CheckpointError(
            f"`{path}` is no checkpoint of a training run of this version",
            hint="start again with --force",
        ) from None


def weights_of(tensors: Mapping[str, Tensor], names: Mapping[str, Tensor], *, path: Path) -> dict[str, Tensor]:
    """The weights in a checkpoint. Raises CheckpointError unless their names and shapes are those of `names`."""
    found = {name.removeprefix(WEIGHT): tensor for name, tensor in tensors.items() if name.startswith(WEIGHT)}
    odd = sorted(found.keys() ^ names.keys()) or [name for name in found if found[name].shape != names[name].shape]
    if odd:
        raise CheckpointError(
            f"`{path}` is of another model or other sets of parameters: {list_keys(odd)}",
            hint="name the same model and sets, or start again with --force",
        )
    return found
