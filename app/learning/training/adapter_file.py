"""Writes a trained adapter in the format of the released adapters, and checks the file before it replaces another."""

import os
import re
from pathlib import Path
from typing import Any

import torch

from llama_adapter.app.learning.training.model import TrainableModel
from llama_adapter.app.models.checkpoints import QUESTION_KEYS
from llama_adapter.llm.weights.adapter import check_fits, open_adapter
from llama_adapter.runtime.atomic_write import atomic_write

_V1 = re.compile(r"adapter_query\.weight|layers\.\d+\.attention\.gate")


def write_adapter(model: TrainableModel, path: str | os.PathLike[str]) -> Path:
    """Write {"model": tensors, "config": ...} as `torch.save` does; returns the path.

    An adapter of queries and gates for texts is written as those of LLaMA-Adapter V1 are, with the tensors at the top.
    Its programs look for them there, and ignore a `config` beside them, which has the question, if one was learned.

    The new file is read back with the usual loader before it replaces the file at `path`. Raises CheckpointError if
    this fails, and OSError.
    """
    with atomic_write(path) as file:
        torch.save(_content(model), file)
        file.flush()
        written = open_adapter(file.name, for_texts=model.vision is None)
        check_fits(written, model.sources.llama)
    return Path(path)


def _content(model: TrainableModel) -> dict[str, Any]:
    tensors, config = model.adapter_tensors(), model.file_config()
    is_v1 = model.vision is None and all(map(_V1.fullmatch, tensors))
    if not is_v1:
        return {"model": tensors, "config": config}
    asked = {key: config[key] for key in (QUESTION_KEYS["question"],) if key in config}  # texts have no caption prompt
    return {**tensors, **({"config": asked} if asked else {})}
