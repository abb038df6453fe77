"""Checkpoints, from which a run resumes: weights, the optimiser's moments, and the state of the loop.

They are written atomically. A digest tells damaged ones, from which a run would not go on with the same bits.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save
from torch import Tensor

from llama_adapter.runtime.atomic_write import atomic_write, write_text
from llama_adapter.runtime.errors import CheckpointError, LlamaAdapterError, UsageError
from llama_adapter.runtime.tensor_files.files import check_names, check_shapes, read_metadata, read_safetensors
from llama_adapter.runtime.text import shown_name


class TrainingError(LlamaAdapterError):
    """A run cannot continue: losses are not finite, the disk is full, or a file of it is damaged."""


def other_run(folder: Path) -> UsageError:
    """The error if `--resume` finds a run with other settings or data in the folder."""
    return UsageError(
        f"The run in `{shown_name(str(folder))}` has another model, data, examples, settings or version",
        hint="resume with the same model, data, settings and version, or start again with --force",
    )


LAST, BEST = "last.safetensors", "best.safetensors"
_FORMAT: Final = "llama-adapter training 2"
WEIGHT: Final = "weight/"  # prefix of the names of weights; moments have other prefixes
_RESTORE: Final = "restore it from a copy, or start again with --force"
_OTHER_MODEL: Final = "name the same model and sets, or start again with --force"


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
        file.write(save(held, metadata={"format": _FORMAT, "state": values, "sha256": _digest(held, values)}))
    write_text(path.with_suffix(".json"), json.dumps(asdict(state), indent=1) + "\n")


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], LoopState]:
    """Tensors and state as they were written. Raises CheckpointError for a missing, damaged or other file.

    `check_tensors` checks the names and shapes of the tensors, which depend on the model.
    """
    tensors, metadata = read_safetensors(path), read_metadata(path)
    values = metadata.get("state", "")
    if (metadata.get("format"), metadata.get("sha256")) != (_FORMAT, _digest(tensors, values)):
        raise CheckpointError(
            f"`{path}` is damaged, or is no checkpoint of a training run of this version", hint=_RESTORE
        )
    return tensors, LoopState(**json.loads(values))


def _digest(tensors: Mapping[str, Tensor], state: str) -> str:
    """SHA-256 of the state, and of the names, forms and numbers of the tensors, in hexadecimal."""
    digest = hashlib.sha256(state.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        # A copy, because numpy would keep FSDP from freeing the storage of a parameter.
        digest.update(tensor.clone().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_tensors(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], *, path: Path) -> None:
    """Raise CheckpointError unless the tensors of a checkpoint have these names and shapes."""
    what = f"`{path}`"
    check_names(tensors, shapes, what=what, meaning=_OTHER_MODEL)
    check_shapes({name: tuple(one.shape) for name, one in tensors.items()}, shapes, what=what, meaning=_OTHER_MODEL)


def weight_shapes(parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the weights in a checkpoint of these parameters."""
    return {f"{WEIGHT}{name}": tuple(one.shape) for name, one in parameters.items()}


def weights_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in a checkpoint, by the names of their parameters."""
    return {name.removeprefix(WEIGHT): tensor for name, tensor in tensors.items() if name.startswith(WEIGHT)}
