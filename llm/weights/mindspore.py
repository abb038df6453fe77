"""Reads LLaMA in MindFormers' format, a `.ckpt` file and a YAML with the sizes, without MindSpore."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from llama_adapter.llm.weights.names import LlamaSource, SplitTensor, checked_config, checked_source
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import list_keys
from llama_adapter.runtime.tensor_files.ckpt_files import read_ckpt
from llama_adapter.runtime.tensor_files.files import check_dense, count_blocks, require_numbers

# MindFormers' names -> Meta's names. Names of tensors in layers differ only in their prefix.
_TOP = {
    "model.tok_embeddings.embedding_weight": "tok_embeddings.weight",
    "model.norm_out.weight": "norm.weight",
    "lm_head.weight": "output.weight",
}
_OURS = {meta: name for name, meta in _TOP.items()}
_DEFAULTS = {"rms_norm_eps": 1e-5, "theta": 10000.0}  # of MindFormers' LlamaConfig
_MAX_YAML = 1 << 20
_ITS_YAML = "use the YAML that the checkpoint was made with"
_MEANING = "the checkpoint is not MindFormers' LLaMA, or its YAML is that of another model"


def open_mindspore(folder: str | os.PathLike[str]) -> LlamaSource:
    """Open a folder with one `.ckpt` and one YAML, whose `model.model_config` has `num_heads`; memory-mapped.

    MindFormers converts Hugging Face's checkpoints by renaming only, so rows of q and k are in Hugging Face's order.
    Raises CheckpointError for a missing or damaged file, unknown, missing or misshapen tensors, and models that are
    computed differently (scaled rotary embedding).
    """
    place = Path(folder)
    file, settings = (only_file(place, pattern) for pattern in ("*.ckpt", "*.y*ml"))
    config = _read_settings(settings)
    renamed = {meta_name(name): tensor for name, tensor in read_ckpt(file).items()}
    check_dense(renamed, what=f"`{file}`")
    sizes = {
        "vocab_size": _rows(renamed, "tok_embeddings.weight", file),
        "dim": _rows(renamed, "layers.0.attention.wq.weight", file),
        "num_layers": count_blocks(list(renamed), "layers.", what=f"`{file}`"),
        "ffn_dim": _rows(renamed, "layers.0.feed_forward.w1.weight", file),
        "num_heads": config["num_heads"],
        "num_kv_heads": config.get("n_kv_heads", config["num_heads"]),
        "norm_eps": float(config["rms_norm_eps"]),
        "rope_theta": float(config["theta"]),
    }
    for name, key in (("hidden_size", "dim"), ("num_layers", "num_layers")):
        if config.get(name, sizes[key]) != sizes[key]:
            raise CheckpointError(
                f"`{settings}` says {name} {config[name]}, and the weights beside it have {sizes[key]}", hint=_MEANING
            )
    return checked_source(
        place,
        [file],
        {name: SplitTensor((tensor,)) for name, tensor in renamed.items()},
        config=checked_config(place, sizes),
        stated_in=settings.name,
        meaning=_MEANING,
        half_split=True,
    )


def only_file(folder: Path, pattern: str) -> Path:
    """The one file of a folder that matches. Raises CheckpointError."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        names = list_keys([path.name for path in found]) if found else "none"
        raise CheckpointError(
            f"`{folder}` should have one file {pattern}, and has {names}",
            hint="several checkpoints of a distributed training are to be merged first, by MindFormers",
        )
    return found[0]


def read_model_config(path: Path) -> dict[str, Any]:
    """The `model.model_config` of a YAML of MindFormers. Raises CheckpointError."""
    try:
        if path.stat().st_size > _MAX_YAML:
            raise ValueError("it is too large")
        model = yaml.safe_load(path.read_text(encoding="utf-8"))["model"]["model_config"]
        return {name: value for name, value in dict(model).items() if value is not None}
    except (OSError, ValueError, TypeError, KeyError, RecursionError, yaml.YAMLError):
        raise CheckpointError(f"`{path}` has no `model.model_config`", hint=_ITS_YAML) from None


def _read_settings(path: Path) -> dict[str, Any]:
    config = _DEFAULTS | read_model_config(path)
    require_numbers(config, path=path, whole=("num_heads",), real=("rms_norm_eps", "theta"), hint=_ITS_YAML)
    if config.get("extend_method", "None") not in ("None", "none"):  # without it, MindFormers uses no scaling_factor
        said = f"The LLaMA in `{path.parent}` scales its rotary embedding, which is not read from a YAML"
        raise CheckpointError(said, hint="name the Hugging Face folder that the .ckpt was converted from")
    return config


def meta_name(name: str) -> str:
    """Meta's name of a tensor. Unknown names are returned unchanged, so that they are reported."""
    return _TOP.get(name) or re.sub(r"^model\.(?=layers\.\d+\.)", "", name)


def _rows(tensors: Mapping[str, Tensor], name: str, file: Path) -> int:
    if name not in tensors or tensors[name].ndim != 2:
        theirs = _OURS.get(name, f"model.{name}")
        raise CheckpointError(f"`{file}` lacks the matrix `{theirs}`", hint=_MEANING)
    return tensors[name].shape[0]
