"""Checkpoints, from which a run resumes: weights, the optimiser's moments, and the state of the loop.

They are written atomically.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save
from torch import Tensor

from llama_adapter.app.learning.training.stepping import SECOND_MOMENT, STEP
from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.errors import CheckpointError, LlamaAdapterError, UsageError
from llama_adapter.runtime.json_object import check_fields, read_object
from llama_adapter.runtime.tensor_files.files import check_names, check_shapes, read_metadata, read_safetensors
from llama_adapter.runtime.text import shown_excerpt, shown_name


class TrainingError(LlamaAdapterError):
    """A run cannot continue: losses are not finite, the disk is full, or a file of it is damaged."""


def other_run(folder: Path) -> UsageError:
    """The error if `--resume` finds a run with other settings or data in the folder."""
    return UsageError(
        f"The run in `{shown_name(str(folder))}` has other data, examples or settings",
        hint="resume with the same data and settings, or start again with --force",
    )


LAST, BEST = "last.safetensors", "best.safetensors"
_FORMAT: Final = "llama-adapter training 1"
WEIGHT: Final = "weight/"  # prefix of the names of weights; moments have other prefixes
_MOST_EXAMPLES: Final = 1 << 53
_RESTORE: Final = "restore it from a copy, or start again with --force"
_OTHER_MODEL: Final = "name the same model and sets, or start again with --force"
_FIELDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    **{"step": int, "num_steps": int, "run": str, "best": list, "best_step": int, "least_loss": (float, type(None))},
    **{"num_worse": int, "skipped": list, "elapsed_s": float, "num_examples": int, "scaler": dict},
}


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
    """Tensors and state. Raises CheckpointError if the file is missing, damaged or not a checkpoint of a training.

    `check_tensors` checks the tensors, whose names and shapes depend on the model.
    """
    tensors, metadata = read_safetensors(path), read_metadata(path)
    try:
        if metadata.get("format") != _FORMAT or "state" not in metadata:
            raise ValueError("it has another format")
        return tensors, _state(metadata["state"])
    except ValueError as error:
        raise CheckpointError(
            f"`{path}` is no checkpoint of a training run of this version: {shown_excerpt(str(error))}", hint=_RESTORE
        ) from None


def _state(text: str) -> LoopState:
    """The state that `write_checkpoint` wrote. Raises ValueError for any other text."""
    values = read_object(text)
    check_fields(values, _FIELDS, what="its state")
    state = LoopState(**values)
    wrong = {
        "step": not 0 <= state.step <= state.num_steps,
        "best": len(state.best) > 2 or not all(type(one) is float and one < math.inf for one in state.best),
        "best_step": not 0 <= state.best_step <= state.step,
        "least_loss": state.least_loss is not None and not math.isfinite(state.least_loss),
        "num_worse": not 0 <= state.num_worse <= state.step,
        "skipped": not _are_steps(state.skipped, state.step),
        "elapsed_s": not 0 <= state.elapsed_s < math.inf,
        "num_examples": not state.step <= state.num_examples < _MOST_EXAMPLES,
        "scaler": bool(state.scaler) and not _is_scaler(state.scaler),
    }
    if any(wrong.values()):
        raise ValueError(f"impossible values of {', '.join(name for name in wrong if wrong[name])}")
    return state


def _are_steps(values: list[Any], last: int) -> bool:
    """Whether the values are different steps from 1 to `last`, in order."""
    are_whole = all(type(one) is int and 1 <= one <= last for one in values)
    return are_whole and all(one < following for one, following in pairwise(values))


def _is_scaler(values: Mapping[str, Any]) -> bool:
    """Whether values are the state of a gradient scaler, which changes only its scale and the tracker of its growth."""
    own = torch.amp.GradScaler("cpu").state_dict()
    if {name: type(value) for name, value in values.items()} != {name: type(value) for name, value in own.items()}:
        return False
    is_same = all(values[name] == own[name] for name in own if name not in ("scale", "_growth_tracker"))
    return is_same and 0 < values["scale"] < math.inf and 0 <= values["_growth_tracker"] < values["growth_interval"]


def check_tensors(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], *, num_steps: int, path: Path
) -> None:
    """Raise CheckpointError unless the tensors of a checkpoint have these names and shapes, and possible values.

    All are float32 and finite. Second moments are not negative. Steps of the optimiser are whole numbers from 1 to
    `num_steps`.
    """
    what = f"`{path}`"
    check_names(tensors, shapes, what=what, meaning=_OTHER_MODEL)
    check_shapes({name: tuple(one.shape) for name, one in tensors.items()}, shapes, what=what, meaning=_OTHER_MODEL)
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{what} holds `{shown_excerpt(name)}` as {kind}, where float32 is wanted", hint=_RESTORE
            )
        is_sound = bool(torch.isfinite(tensor).all())
        if name.startswith(SECOND_MOMENT):
            is_sound = is_sound and bool((tensor >= 0).all())
        elif name.startswith(STEP):
            is_sound = is_sound and 1 <= float(tensor) <= num_steps and float(tensor).is_integer()
        if not is_sound:
            raise CheckpointError(f"{what} has impossible numbers in `{shown_excerpt(name)}`", hint=_RESTORE)


def check_resumable(
    tensors: Mapping[str, Tensor],
    state: LoopState,
    *,
    weights: Mapping[str, tuple[int, ...]],
    moments: Mapping[str, tuple[int, ...]],
    path: Path,
) -> None:
    """Raise CheckpointError unless a run can go on from a checkpoint with these names and shapes, as `check_tensors`.

    A checkpoint has no moments if no step changed the weights.
    """
    # float16 does not count all steps it skips.
    has_moments = any(name.startswith(STEP) for name in tensors) if state.scaler else state.step > len(state.skipped)
    check_tensors(tensors, {**weights, **(moments if has_moments else {})}, num_steps=state.step, path=path)


def weight_shapes(parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the weights in a checkpoint of these parameters."""
    return {f"{WEIGHT}{name}": tuple(one.shape) for name, one in parameters.items()}


def weights_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in a checkpoint, by the names of their parameters."""
    return {name.removeprefix(WEIGHT): tensor for name, tensor in tensors.items() if name.startswith(WEIGHT)}
