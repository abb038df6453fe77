"""Files of a run that goes on later: weights, moments of the optimiser, and the state of the loop. Atomic."""

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
WEIGHT: Final = "weight/"  # in front of names of weights; names of moments have their own


@dataclass(kw_only=True, slots=True)
class LoopState:
    """Where a run is. All of it is in `last.json` too, for people."""

    step: int = 0  # steps done, skipped ones too
    num_steps: int = 0  # of the whole run
    run: str = ""  # digest of the settings and data that the steps depend on
    best: list[float] = field(default_factory=list)  # `Validation.key` of the best weights; empty: none yet
    best_step: int = 0
    least_loss: float | None = None  # on the validation examples
    num_worse: int = 0  # evaluations in a row with neither a better key nor a smaller loss
    skipped: list[int] = field(default_factory=list)  # steps with a loss or gradient that was not finite
    elapsed_s: float = 0.0
    num_examples: int = 0  # learnt, counted in every epoch
    scaler: dict[str, Any] = field(default_factory=dict)  # of float16

    def judge(self, key: list[float], loss: float | None) -> bool:
        """Take in an evaluation at `step`; returns whether it is the best so far.

        A falling loss counts as progress. At first a model often gives one answer to everything, while what it has
        learned shows in the loss alone.
        """
        is_best, falls = not self.best or key > self.best, False
        if loss is not None and math.isfinite(loss) and (self.least_loss is None or loss < self.least_loss):
            self.least_loss, falls = loss, True
        if is_best:
            self.best, self.best_step = key, self.step
        self.num_worse = 0 if is_best or falls else self.num_worse + 1
        return is_best


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], state: LoopState) -> None:
    """Replace a checkpoint; it is complete or the earlier one, whenever the process ends. Raises OSError."""
    values = json.dumps(asdict(state))
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_write(path) as file:
        file.write(save(held, metadata={"format": _FORMAT, "state": values}))
    with atomic_write(path.with_suffix(".json")) as file:
        file.write(json.dumps(asdict(state), indent=1).encode() + b"\n")


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], LoopState]:
    """Tensors and state. Raises CheckpointError for a file that is missing, damaged or no such checkpoint."""
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
    """The weights in a checkpoint. Raises CheckpointError unless they are those of `names`, in shape too."""
    found = {name.removeprefix(WEIGHT): tensor for name, tensor in tensors.items() if name.startswith(WEIGHT)}
    odd = sorted(found.keys() ^ names.keys()) or [name for name in found if found[name].shape != names[name].shape]
    if odd:
        raise CheckpointError(
            f"`{path}` is of another model or other sets of parameters: {list_keys(odd)}",
            hint="name the same model and sets, or start again with --force",
        )
    return found
