"""Opens LLaMA folders in Hugging Face's format: `config.json` beside safetensors or `pytorch_model*.bin` files."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from llama_adapter.llm.weights.names import (
    LlamaSource,
    SplitTensor,
    check_heads,
    check_layers,
    checked_source,
    from_huggingface,
)
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import read_json
from llama_adapter.runtime.tensor_files.files import check_dense, list_keys, read_tensor_file, require_numbers
from llama_adapter.runtime.text import shown_excerpt

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# Of a LLaMA inside a larger model, such as LLaVA. transformers omits entries of `text_config` that equal the defaults
# of its LlamaConfig.
_PART_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-6,
}
_OF_THE_WHOLE = ("quantization_config", "tie_word_embeddings")  # of the whole model, but valid for the LLaMA
_PART_NAMES = re.compile(
    r"(?:model\.language_model|language_model\.model)\.(.+)|(?:language_model\.)?(lm_head\.weight)"
)
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_MEANING = "the folder is incomplete, or config.json and weights come from different models; download it again"


def open_huggingface(folder: str | os.PathLike[str]) -> LlamaSource:
    """Open a Hugging Face LLaMA folder, memory-mapped: single or sharded safetensors, or `pytorch_model*.bin`.

    Of a model that has a LLaMA as a part, such as LLaVA, that part is opened.

    Raises CheckpointError for a missing or damaged file, unknown, missing or misshapen tensors, and models that
    are computed differently (other architectures, grouped-query attention, scaled rotary embedding, biases,
    quantised weights).
    """
    place = Path(folder)
    config = read_json(place / "config.json")
    part = _part_config(config)
    config = config if part is None else part
    rope_theta = _check_config(config, place)
    files = _weight_files(place)
    by_key: dict[str, Tensor] = {}
    for path in files:
        tensors = read_tensor_file(path).tensors
        if part is not None:
            tensors = _part_tensors(tensors, file=path)
        check_dense(tensors, what=f"`{path}`")
        twice = [key for key in tensors if key in by_key]
        if twice:
            raise CheckpointError(f"`{path}` repeats tensors of another file: {list_keys(twice)}", hint=_MEANING)
        by_key |= tensors
    if part is not None and not any(name.startswith("model.") for name in by_key):
        raise CheckpointError(
            f"The `config.json` of `{place}` describes a LLaMA inside a larger model, but no tensor's name begins with "
            "`model.language_model.` or `language_model.model.`",
            hint="save the model again with transformers, or pass the folder of the LLaMA alone",
        )
    sizes = {
        "vocab_size": config["vocab_size"],
        "dim": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "ffn_dim": config["intermediate_size"],
    }
    renamed = _rename(by_key, tied=bool(config.get("tie_word_embeddings", False)))
    check_layers(list(renamed), sizes["num_layers"], config=place / "config.json")
    return checked_source(
        place,
        files,
        {name: SplitTensor((tensor,)) for name, tensor in renamed.items()},
        sizes=sizes,
        config="config.json",
        meaning=_MEANING,
        num_heads=config["num_attention_heads"],
        norm_eps=float(config["rms_norm_eps"]),
        rope_theta=rope_theta,
        half_split=True,
    )


def _check_config(config: Mapping[str, Any], place: Path) -> float:
    """Refuse models that are computed differently; returns the base of the rotary embedding."""
    kind = config.get("model_type")
    if kind != "llama":
        raise CheckpointError(
            f"`{place}` holds a model of type {shown_excerpt(str(kind))!r}, not 'llama'",
            hint="the adapters extend LLaMA; pass a LLaMA folder as --llama-dir",
        )
    # transformers 5 has rope_parameters; before, its content was in rope_theta and rope_scaling.
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"`{place / 'config.json'}` has `rope_parameters` that are not an object", hint=_MEANING)
    theta = rope.get("rope_theta", config.get("rope_theta"))
    used = {**config, "rope_theta": 10000.0 if theta is None else theta}
    require_numbers(used, path=place / "config.json", whole=_SIZES, real=("rms_norm_eps", "rope_theta"), hint=_MEANING)
    heads = config["num_attention_heads"]
    check_heads(config, "num_attention_heads", "num_key_value_heads", folder=place)
    if config.get("head_dim") not in (None, config["hidden_size"] // heads):
        raise CheckpointError(f"The LLaMA in `{place}` has heads of another width than hidden_size / heads")
    scaling = config.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
    if scaling:
        raise CheckpointError(
            f"The LLaMA in `{place}` scales its rotary embedding (rope_scaling), which is not supported",
            hint="use a LLaMA without rope_scaling; the adapters were trained on LLaMA-7B",
        )
    unsupported = [name for name in ("attention_bias", "mlp_bias", "quantization_config") if config.get(name)]
    if config.get("hidden_act", "silu") != "silu":
        unsupported.append("hidden_act")
    if unsupported:
        raise CheckpointError(
            f"The LLaMA in `{place}` is computed in a way that is not supported: its config.json sets "
            f"{list_keys(unsupported)}",
            hint="use the unmodified LLaMA weights",
        )
    return float(used["rope_theta"])


def _weight_files(place: Path) -> list[Path]:
    for single in _SINGLE:
        index = place / f"{single}.index.json"
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"`{index}` has no weight_map", hint=_MEANING)
            names = sorted({str(name) for name in weight_map.values()})
            absent = [name for name in names if not (place / name).exists()]
            if absent:
                raise CheckpointError(
                    f"`{place}` lacks {list_keys(absent)}, named in `{index.name}`",
                    hint="copy the missing shard",
                )
            return [place / name for name in names]
        if (place / single).exists():
            return [place / single]
    raise CheckpointError(
        f"`{place}` has a config.json but no weights",
        hint=f"weights are {' or '.join(_SINGLE)}, or shards with an index",
    )


def _rename(by_key: Mapping[str, Tensor], *, tied: bool) -> dict[str, Tensor]:
    """Meta's names; unknown keys stay as they are, to be reported. A tied output is the embedding."""
    renamed: dict[str, Tensor] = {}
    for key, tensor in by_key.items():
        if key.endswith(".rotary_emb.inv_freq"):
            continue  # the rotary table of older files is computed from rope_theta
        renamed[from_huggingface(key) or key] = tensor
    if tied and "tok_embeddings.weight" in renamed:
        renamed["output.weight"] = renamed["tok_embeddings.weight"]
    return renamed


def _part_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration of the LLaMA inside a model; None if `config` does not describe such a model."""
    part = config.get("text_config")
    if config.get("model_type") == "llama" or not isinstance(part, dict) or part.get("model_type") != "llama":
        return None
    return {**_PART_DEFAULTS, **part, **{name: config[name] for name in _OF_THE_WHOLE if config.get(name)}}


def _part_tensors(tensors: Mapping[str, Tensor], *, file: object) -> dict[str, Tensor]:
    """The tensors of the LLaMA, renamed as in a plain LLaMA; tensors of other parts are left out.

    Raises CheckpointError if two tensors get the same name.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if (match := _PART_NAMES.fullmatch(name)) is None:
            continue
        own = match[2] or f"model.{match[1]}"
        if own in found:
            raise CheckpointError(
                f"`{file}` has the tensor `{own}` of a LLaMA twice, under two prefixes with `language_model`",
                hint="the folder mixes files of two versions of transformers; save the model again",
            )
        found[own] = tensor
    return found
