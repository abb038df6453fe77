"""Writes a trained adapter in the format of the released adapters, and checks the file before it replaces another."""

import os
from pathlib import Path

import torch

from llama_adapter.app.training.model import TrainableModel
from llama_adapter.llm.weights.adapter import check_fits, open_adapter
from llama_adapter.runtime.atomic_write import atomic_write


def write_adapter(model: TrainableModel, path: str | os.PathLike[str]) -> Path:
    """Write {"model": tensors, "config": ...} as `torch.save` does; returns the path.

    The new file is read back with the usual loader before it replaces the file at `path`. Raises CheckpointError if
    this fails, and OSError.
    """
    with atomic_write(path) as file:
        torch.save({"model": model.adapter_tensors(), "config": model.file_config()}, file)
        file.flush()
        written = open_adapter(file.name, for_texts=model.vision is None)
        check_fits(written, model.sources.llama)
    return Path(path)
