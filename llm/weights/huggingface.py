"""Opens LLaMA folders in Hugging Face's format: `config.json` beside safetensors or `pytorch_model*.bin` files."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.weights.families import FAMILIES, MEANING, Family, describe, family_of, read_entries
from llama_adapter.llm.weights.folds import folded
from llama_adapter.llm.weights.names import (
    PARTS,
    LlamaSource,
    SplitTensor,
    check_layers,
    checked_source,
    from_huggingface,
    matrix_shapes,
    split_rows,
)
from llama_adapter.llm.weights.peft_config import lora_hint
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import list_keys, read_json
from llama_adapter.runtime.tensor_files.files import check_dense, check_shapes, read_tensor_file
from llama_adapter.runtime.tensor_files.gguf_names import WEIGHT_FILES

# Types of the language model in larger models that may not say it in their `text_config`.
_USUAL_PARTS = {"gemma3": "gemma3_text"} | dict.fromkeys(("llava", "llava_next", "idefics3", "smolvlm"), "llama")
_OF_THE_WHOLE = ("quantization_config", "tie_word_embeddings")  # of the whole model, but valid for its language model
_PART_NAMES = re.compile(
    r"(?:model\.language_model|language_model\.model|model\.text_model)\.(.+)|(?:language_model\.)?(lm_head\.weight)"
)
# Modules whose rows are those of several matrices: of Phi-3 and, in groups of heads, of InternLM2.
_FUSED = {
    "self_attn.qkv_proj": PARTS["attention.qkv"],
    "mlp.gate_up_proj": PARTS["feed_forward.gate_up"],
    "attention.wqkv": PARTS["attention.qkv"],
}
_IN_GROUPS = ("attention.wqkv",)


def open_huggingface(folder: str | os.PathLike[str]) -> LlamaSource:
    """Open a Hugging Face LLaMA folder, memory-mapped: single or sharded safetensors, or `pytorch_model*.bin`.

    The families are those of `FAMILIES`. Of a model that has such a decoder as a part, such as LLaVA, that part is
    opened.

    Raises CheckpointError for a missing or damaged file, unknown, missing or misshapen tensors, and models that
    are computed in other ways or have quantised weights.
    """
    place = Path(folder)
    path = place / "config.json"
    config = read_json(path)
    part = _part_config(config)
    config = config if part is None else part
    family = family_of(config, folder=place)
    entries = read_entries(config, family, path=path)
    files = weight_files(place)
    by_key: dict[str, Tensor] = {}
    for file in files:
        tensors = read_tensor_file(file).tensors
        if part is not None:
            tensors = _part_tensors(tensors, file=file)
        check_dense(tensors, what=f"`{file}`")
        twice = [key for key in tensors if key in by_key]
        if twice:
            raise CheckpointError(f"`{file}` repeats tensors of another file: {list_keys(twice)}", hint=MEANING)
        by_key |= tensors
    if part is not None and not any(name.startswith("model.") for name in by_key):
        raise CheckpointError(
            f"The `config.json` of `{place}` describes a LLaMA inside a larger model, but no tensor's name begins with "
            "`model.language_model.`, `language_model.model.` or `model.text_model.`",
            hint="save the model again with transformers, or pass the folder of the LLaMA alone",
        )
    is_bare = "embed_tokens.weight" in by_key  # saved without its head, which is the embedding
    prefix = "layers." if is_bare else "model.layers."
    check_layers(by_key, entries["num_hidden_layers"], prefix=prefix, config=path)
    if is_bare:
        by_key = {key if key.startswith("lm_head.") else f"model.{key}": tensor for key, tensor in by_key.items()}
    described = describe(config, entries, family, path=path)
    renamed = _rename(by_key, family, described.config, what=f"LLaMA in `{place}` does not fit its config.json")
    if entries["tie_word_embeddings"]:
        _tie(renamed)
    return checked_source(
        place,
        files,
        folded(renamed, described.folds, described.config),
        config=described.config,
        stated_in="config.json",
        meaning=MEANING,
        half_split=True,
        biased=described.biased,
        embedding_scale=described.folds.embedding_scale,
    )


def weight_files(place: Path) -> list[Path]:
    """The files with the weights of a folder. Raises CheckpointError if some are missing."""
    for single in WEIGHT_FILES:
        if (place / single).exists():  # as in transformers: the index may be of shards that were joined
            return [place / single]
        index = place / f"{single}.index.json"
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"`{index}` has no weight_map", hint=MEANING)
            names = sorted({str(name) for name in weight_map.values()})
            absent = [name for name in names if not (place / name).exists()]
            if absent:
                raise CheckpointError(
                    f"`{place}` lacks {list_keys(absent)}, named in `{index.name}`",
                    hint="copy the missing shard",
                )
            return [place / name for name in names]
    raise CheckpointError(
        f"`{place}` has a config.json but no weights",
        hint=lora_hint(place) or f"weights are {' or '.join(WEIGHT_FILES)}, or shards with an index",
    )


def _rename(
    by_key: Mapping[str, Tensor], family: Family, config: DecoderConfig, *, what: str
) -> dict[str, SplitTensor]:
    """Meta's names; unknown keys stay as they are, to be reported. Fused tensors become views of their parts."""
    norms, shapes = config.norms, matrix_shapes(config)
    renamed: dict[str, SplitTensor] = {}
    for key, tensor in by_key.items():
        if key.endswith(".rotary_emb.inv_freq"):
            continue  # the rotary table of older files is computed from rope_theta
        match = re.fullmatch(r"model\.(layers\.\d+)\.(.+)\.(weight|bias)", key)
        module = match[2] if match else ""
        if match and (parts := _FUSED.get(module)):
            wanted = (sum(shapes[part][0] for part in parts), *tensor.shape[1:])
            check_shapes({key: tuple(tensor.shape)}, {key: wanted}, what=what, meaning=MEANING)
            num_groups = config.num_kv_heads if module in _IN_GROUPS else 1
            split = split_rows(tensor, config, parts, num_groups=num_groups)
            renamed |= {f"{match[1]}.{part}.{match[3]}": one for part, one in split.items()}
            continue
        own = key.removeprefix("model.") if family.has_meta_names else from_huggingface(key, norms=norms)
        renamed[own or key] = SplitTensor((tensor,))
    return renamed


def _tie(tensors: dict[str, SplitTensor]) -> None:
    """Make embedding and head one if the file has only one of them. No tensor is read.

    If it has two, both are taken as they are. If they differ, its configuration is wrong, as transformers assumes too:
    that of a model with a LoRA in one of them, or of the language model in Idefics3 and SmolVLM, where the
    configuration of the whole decides.
    """
    names = ("tok_embeddings.weight", "output.weight")
    found = [tensors[name] for name in names if name in tensors]
    if len(found) == 1:
        tensors |= dict.fromkeys(names, found[0])


def _part_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration of the language model inside a model; None if `config` does not describe such a model."""
    part, kind = config.get("text_config"), config.get("model_type")
    if not isinstance(part, dict) or not isinstance(kind, str) or kind in FAMILIES:
        return None
    part = {"model_type": _USUAL_PARTS.get(kind), **part}
    return (
        {**part, **{name: config[name] for name in _OF_THE_WHOLE if config.get(name)}} if part["model_type"] else None
    )


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
