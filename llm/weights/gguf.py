"""Opens GGUF files: their keys become a Hugging Face configuration, their tensors get Meta's names.

Keys and names: ggml's `gguf.md`, and llama.cpp's converters, which also order the rows of q and k.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.pieces.gguf_keys import check_kind
from llama_adapter.llm.weights.families import describe, family_of, read_entries
from llama_adapter.llm.weights.folds import folded
from llama_adapter.llm.weights.names import (
    PARTS,
    LlamaSource,
    SplitTensor,
    check_layers,
    checked_source,
    matrix_shapes,
    split_rows,
)
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import list_keys
from llama_adapter.runtime.tensor_files.gguf_files import Blocks, GgufFile, read_gguf
from llama_adapter.runtime.text import shown_excerpt

# Architecture -> Hugging Face's `model_type` of the same computation.
_FAMILIES: Final = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "gemma2", "phi3", "smollm3", "olmo2", "granite")},
    **{"gemma3": "gemma3_text", "internlm2": "llama"},
}
_WITH_WINDOWS: Final = {"llama": "mistral", "olmo2": "olmo3"}  # those of files with a sliding window
_META_ORDER: Final = ("llama", "smollm3", "granite", "internlm2")  # whose rows of q and k are in Meta's order
_TOP: Final = {"token_embd": "tok_embeddings", "output_norm": "norm", "output": "output"}
_LAYER: Final = {
    "attn_norm": "attention_norm",
    "ffn_norm": "ffn_norm",
    "post_attention_norm": "attention_out_norm",
    "post_ffw_norm": "ffn_out_norm",
    "attn_q": "attention.wq",
    "attn_k": "attention.wk",
    "attn_v": "attention.wv",
    "attn_qkv": "attention.wqkv",
    "attn_output": "attention.wo",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
}
# Matrices that may have the rows of several ones, as in Phi-3.
_FUSED: Final = {"attention.wqkv": PARTS["attention.qkv"], "feed_forward.w3": PARTS["feed_forward.gate_up"]}
_DIVISORS: Final = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_LARGEST_GEMMAS: Final = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models
# Keys without their architecture -> entries of a configuration.
_ENTRIES: Final = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.causal": "is_causal",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "rope.global.freq_base": "rope_theta",  # of Ollama, like the next one
    "rope.local.freq_base": "rope_local_base_freq",
}
_PATTERN: Final = "attention.sliding_window_pattern"  # of layers: a number, or for each layer whether it has the window
# Keys that have no default.
_REQUIRED: Final = (
    *("block_count", "embedding_length", "feed_forward_length", "attention.head_count"),
    "attention.layer_norm_rms_epsilon",
)
_MEANING: Final = "the file is incomplete, or of a newer kind; fetch it again, or the model in Hugging Face's format"


def open_gguf(path: str | os.PathLike[str]) -> LlamaSource:
    """Open a GGUF file, or all files of a split one, memory-mapped.

    Quantised matrices are computed in float32 when they are read, one at a time. Raises CheckpointError for a missing
    or damaged file, unknown, missing or misshapen tensors, and models that are computed differently.
    """
    place = Path(path)
    file = read_gguf(place)
    check_kind(file.keys, name=str(place))
    keys = _Keys(file, str(place))
    config = _configuration(keys, file)
    family = family_of(config, folder=place)
    entries = read_entries(config, family, path=place)
    of_heads = _of_heads(keys, entries)
    config, entries = config | of_heads, entries | of_heads
    tensors = {name: SplitTensor((tensor,)) for name, tensor in _renamed(file).items()}
    check_layers(file.tensors, entries["num_hidden_layers"], prefix="blk.", config=place)
    described = describe(config, entries, family, path=place)
    tensors = _separated(tensors, described.config)
    if entries["tie_word_embeddings"] and "tok_embeddings.weight" in tensors:
        tensors["output.weight"] = tensors["tok_embeddings.weight"]
    # The norms of Gemma hold their offset.
    folds = dataclasses.replace(described.folds, norm_offset=0.0)
    return checked_source(
        place,
        file.paths,
        folded(tensors, folds, described.config),
        config=described.config,
        stated_in="keys",
        meaning=_MEANING,
        half_split=keys.architecture not in _META_ORDER,
        biased=described.biased,
        embedding_scale=described.folds.embedding_scale,
    )


class _Keys:
    """The keys of the model. Numbers in float32 are read as their shortest decimals, which the configurations had."""

    def __init__(self, file: GgufFile, name: str) -> None:
        self.name, self._keys = name, file.keys
        self.architecture = str(file.keys.get("general.architecture"))
        if self.architecture not in _FAMILIES:
            raise CheckpointError(
                f"`{name}` holds a model of the architecture {shown_excerpt(self.architecture)!r}; supported are "
                f"{', '.join(_FAMILIES)}",
                hint="take a model of one of these",
            )

    def get(self, key: str) -> Any:
        """A number or text, and for `_PATTERN` an array; None if the key is absent or an empty list.

        A list with one number for all layers is that number.
        """
        value = self._keys.get(f"{self.architecture}.{key}")
        if isinstance(value, np.ndarray) and key != _PATTERN:
            if (value != value[:1]).any():
                raise CheckpointError(
                    f"The layers of the model in `{self.name}` differ ({self.architecture}.{key}), which is not "
                    "supported",
                    hint="take a model whose layers have equal sizes",
                )
            value = value[0].item() if len(value) else None
        return float(str(np.float32(value))) if isinstance(value, float) else value


def _configuration(keys: _Keys, file: GgufFile) -> dict[str, Any]:
    """The entries of a `config.json` for these keys."""
    if keys.get("expert_count"):
        raise CheckpointError(
            f"`{keys.name}` holds a mixture of experts, which is not supported", hint="take a dense model"
        )
    if absent := [f"{keys.architecture}.{key}" for key in _REQUIRED if keys.get(key) is None]:
        raise CheckpointError(f"`{keys.name}` lacks the keys {list_keys(absent)}", hint=_MEANING)
    config = {entry: value for key, entry in _ENTRIES.items() if (value := keys.get(key)) is not None}
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    # What a file leaves out is not what the family's configuration leaves out.
    config = {"rope_theta": 10000.0, "num_key_value_heads": heads} | config
    if "head_dim" not in config and type(heads) is type(width) is int and heads > 0:
        config["head_dim"] = width // heads
    families = _FAMILIES | (_WITH_WINDOWS if config.get("sliding_window") else {})
    config |= {"model_type": families[keys.architecture], "tie_word_embeddings": "output.weight" not in file.tensors}
    if "token_embd.weight" in file.tensors:
        config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    for entry, name in (("attention_bias", "attn_output"), ("mlp_bias", "ffn_down")):
        config[entry] = f"blk.0.{name}.bias" in file.tensors
    pattern = keys.get(_PATTERN)
    if not config.get("sliding_window", keys.architecture == "gemma2"):  # a Gemma 2 without the key has windows
        config |= {"sliding_window": None, "sliding_window_pattern": 1}
    elif isinstance(pattern, np.ndarray):
        config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern.tolist()]
    elif pattern is not None:
        config["sliding_window_pattern"] = pattern
    original = keys.get("rope.scaling.original_context_length") or config.get("max_position_embeddings")
    scaling = _scaling(keys, file)
    if scaling is not None:
        scaling["original_max_position_embeddings"] = original
    return config | {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _of_heads(keys: _Keys, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Entries that depend on the width of a head."""
    width = entries["hidden_size"] // entries["num_attention_heads"]
    head_dim = entries["head_dim"] or width
    found: dict[str, Any] = {}
    if (layers := _LARGEST_GEMMAS.get(keys.architecture)) is not None:
        found["query_pre_attn_scalar"] = width if entries["num_hidden_layers"] == layers else head_dim
    rotated = keys.get("rope.dimension_count")
    if type(rotated) is int and rotated != head_dim and keys.architecture not in _META_ORDER:
        found["partial_rotary_factor"] = rotated / head_dim
    return found


def _scaling(keys: _Keys, file: GgufFile) -> dict[str, Any] | None:
    """The entry `rope_scaling`. Llama 3's scaling is stored as divisors of the frequencies, as longrope has them."""
    names = [name for name in _DIVISORS if name in file.tensors]
    absent = [name for name in _DIVISORS[1:] if name not in names]
    if len(absent) == 1:
        raise CheckpointError(f"`{keys.name}` lacks the tensor `{absent[0]}`", hint=_MEANING)
    kind, factor = keys.get("rope.scaling.type"), keys.get("rope.scaling.factor") or keys.get("rope.scale_linear")
    if names:
        found = [file.tensors[name] for name in names]
        divisors = [(one.read() if isinstance(one, Blocks) else one).tolist() for one in found]
        attention = keys.get("rope.scaling.attn_factor") if len(divisors) > 1 else 1.0
        lists = {"short_factor": divisors[0], "long_factor": divisors[-1]}
        return {"rope_type": "longrope", "factor": factor, "attention_factor": attention, **lists}
    if kind == "yarn":
        spelled = {name: (f"rope.scaling.yarn_{name}", f"rope.scaling.{name}") for name in ("beta_fast", "beta_slow")}
        betas = {name: keys.get(usual) or keys.get(ollamas) for name, (usual, ollamas) in spelled.items()}
        attention = keys.get("rope.scaling.yarn_attn_factor")
        stated = None if attention == 1 else attention  # 1 is llama.cpp's default
        return {"rope_type": kind, "factor": factor, "attention_factor": stated, **betas}
    if kind in ("linear", None) and factor not in (None, 1):
        return {"rope_type": "linear", "factor": factor}
    return None if kind in ("linear", "none", None) else {"rope_type": kind}


def _renamed(file: GgufFile) -> dict[str, Tensor | Blocks]:
    """The tensors under Meta's names; unknown names stay, to be reported."""
    found: dict[str, Tensor | Blocks] = {}
    for name, tensor in file.tensors.items():
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        own = None if match is None else _TOP.get(match[2]) if match[1] is None else _LAYER.get(match[2])
        prefix = "" if match is None or match[1] is None else f"layers.{match[1]}."
        found[name if match is None or own is None else f"{prefix}{own}.{match[3]}"] = tensor
    return {name: tensor for name, tensor in found.items() if name not in _DIVISORS}


def _separated(tensors: dict[str, SplitTensor], config: DecoderConfig) -> dict[str, SplitTensor]:
    """The tensors, with fused matrices divided into their parts."""
    shapes, found = matrix_shapes(config), dict[str, SplitTensor]()
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(layers\.\d+\.)(.+)\.weight", name)
        parts = _FUSED.get(match[2], ()) if match else ()
        if match and parts and sum(shapes[part][0] for part in parts) == tensor.shape[0]:
            separated = split_rows(tensor.parts[0], config, parts)
            found |= {f"{match[1]}{part}.weight": one for part, one in separated.items()}
        else:
            found[name] = tensor
    return found
