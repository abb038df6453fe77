"""Checks disk space for a bundle, before anything is computed for it."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from llama_adapter.app.models.sketch import HalfConfig, expected_forms
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.kernels.layout import PackedLayout
from llama_adapter.runtime.schemes import Precision
from llama_adapter.runtime.text import shown_name


def require_space(
    target: Path,
    halves: Iterable[HalfConfig],
    *,
    dtype: torch.dtype,
    precision: Precision,
    packed: PackedLayout | None = None,
) -> None:
    """Raise CheckpointError unless the disk of `target`, a new folder, has enough space for the tensors of `halves`."""
    forms = (expected_forms(half, dtype=dtype, precision=precision, packed=packed) for half in halves)
    needed = sum(form.num_bytes for half in forms for form in half.values())
    place = next(folder for folder in target.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise CheckpointError(
            f"The bundle `{shown_name(str(target))}` takes {needed / 1e6:,.1f} MB, and the disk of `{place}` has "
            f"{free / 1e6:,.1f} MB free",
            hint="make room, or choose another place",
        )
