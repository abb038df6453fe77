"""The families of decoders in Hugging Face's format: what a `config.json` of each says about its decoder.

Entries, defaults and formulas are those of transformers' configuration and modeling files; InternLM2's are its own.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.rotary import Rotary
from llama_adapter.llm.weights.folds import Folds
from llama_adapter.llm.weights.names import MATRICES, checked_config
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import list_keys
from llama_adapter.runtime.tensor_files.files import require_numbers
from llama_adapter.runtime.text import shown_excerpt

MEANING: Final = "the folder is incomplete, or config.json and weights come from different models; download it again"
Entries = Mapping[str, Any]


def _fold_gemma(entries: Entries, config: DecoderConfig) -> Folds:
    last = "attention.wq" if config.qk_norm == "none" else "attention.q_norm"  # a norm undoes factors before it
    scale = math.sqrt(config.head_dim / entries["query_pre_attn_scalar"])
    return Folds(scales={last: scale}, embedding_scale=math.sqrt(config.dim), norm_offset=1.0)


def _fold_granite(entries: Entries, config: DecoderConfig) -> Folds:
    residual = entries["residual_multiplier"]
    return Folds(
        scales={
            "tok_embeddings": entries["embedding_multiplier"],
            "attention.wq": entries["attention_multiplier"] * math.sqrt(config.head_dim),
            "attention.wo": residual,
            "feed_forward.w2": residual,
            "output": 1 / entries["logits_scaling"],
        }
    )


def _rotates_smollm3(entries: Entries, layer: int) -> bool:
    given = entries["no_rope_layers"]  # 1: the layer rotates
    return bool(given[layer]) if given else (layer + 1) % entries["no_rope_layer_interval"] != 0


def _slides(entries: Entries, layer: int) -> bool:
    every = entries.get("sliding_window_pattern")  # the last layer of each group of so many sees everything
    return every is None or (layer + 1) % every != 0


def _slides_qwen(entries: Entries, layer: int) -> bool:
    return layer in range(entries["max_window_layers"], entries["num_hidden_layers"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How the models of one `model_type` are described, and how they differ from LLaMA."""

    defaults: Entries  # of the entries that are read; transformers leaves out entries with these values
    switches: Mapping[str, Any] = field(default_factory=dict)  # arguments of DecoderConfig
    theta: float = 10000.0
    local_theta: float | None = None  # of windows, if they have their own rotary embedding; 0: the others' theta
    biased: tuple[str, ...] = ()  # matrices that always have a bias
    slides: Callable[[Entries, int], bool] = _slides  # whether a layer has the sliding window
    rotates: Callable[[Entries, int], bool] = lambda entries, layer: True
    folds: Callable[[Entries, DecoderConfig], Folds] = lambda entries, config: Folds()
    has_meta_names: bool = False  # names of tensors are Meta's, behind `model.`


_LLAMA: Final = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "original_max_position_embeddings": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_QWEN2: Final = _LLAMA | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": (),
}
# A mistral with `layer_types` is a ministral, as for AutoConfig of transformers.
_MISTRAL: Final = _LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "layer_types": (),
}
_GEMMA: Final = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256.0,
    "sliding_window": 4096,
    "layer_types": (),
}
_OLMO: Final = _LLAMA | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "attention_bias": False}
_NORMS_OF_OLMO: Final = {"norms": "after", "qk_norm": "all"}
_BIASES: Final = {"attention_bias": False, "mlp_bias": False}
_ATTENTION: Final = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
# Entries that give matrices a bias.
_BIASED: Final[Mapping[str, tuple[str, ...]]] = {
    "attention_bias": _ATTENTION,
    "bias": _ATTENTION,
    "mlp_bias": tuple(name for name in MATRICES if name not in _ATTENTION),
}
# `model_type` -> family.
FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family(defaults=_LLAMA | _BIASES),
    "mistral": Family(defaults=_MISTRAL),
    "ministral": Family(defaults=_MISTRAL),
    "qwen2": Family(defaults=_QWEN2, biased=_ATTENTION[:3], slides=_slides_qwen),
    "qwen3": Family(
        defaults=_QWEN2 | {"head_dim": 128, "attention_bias": False}, switches={"qk_norm": "head"}, slides=_slides_qwen
    ),
    "smollm3": Family(
        defaults=_LLAMA
        | _BIASES
        | {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": (),
            "no_rope_layers": (),
            "no_rope_layer_interval": 4,
        },
        theta=2000000.0,
        slides=lambda entries, layer: not _rotates_smollm3(entries, layer),
        rotates=_rotates_smollm3,
    ),
    "gemma2": Family(
        defaults=_GEMMA
        | {
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window_pattern": 2,
        },
        switches={"norms": "both"},
        folds=_fold_gemma,
    ),
    "gemma3_text": Family(
        defaults=_GEMMA
        | {
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
        },
        switches={"norms": "both", "qk_norm": "head"},
        theta=1000000.0,
        local_theta=10000.0,
        folds=_fold_gemma,
    ),
    "phi3": Family(
        defaults=_LLAMA
        | {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        }
    ),
    "olmo2": Family(defaults=_OLMO, switches=_NORMS_OF_OLMO),
    "olmo3": Family(
        defaults=_OLMO | {"sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": ()},
        switches=_NORMS_OF_OLMO,
        theta=500000.0,
        local_theta=0.0,  # the scaling is not that of windows
    ),
    "granite": Family(
        defaults=_LLAMA
        | _BIASES
        | dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0),
        folds=_fold_granite,
    ),
    "internlm2": Family(defaults=_LLAMA | {"vocab_size": 103168, "bias": True}, has_meta_names=True),
}
# Types whose texts transformers computes (`foreign.py`); there is no adapter for them.
FOREIGN: Final = (*("bloom", "gpt2", "gpt_neo", "gptj", "gpt_neox", "opt", "glm", "glm4", "gpt_oss"),)
_ACTIVATIONS: Final = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# What other models need and no decoder here has.
_MISSING: Final[Mapping[str, tuple[str, ...]]] = {
    "experts": (
        *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe", "llama4", "llama4_text"),
        *("dbrx", "glm4_moe", "ernie4_5_moe", "qwen3_vl_moe_text", "minimax_m2", "hunyuan_v1_moe"),
    ),
    "latent attention and experts": ("deepseek_v2", "deepseek_v3", "kimi_k2"),
    "ALiBi": ("mpt", "baichuan"),
    "LayerNorm": (
        *("falcon", "phi", "stablelm", "starcoder2", "cohere", "cohere2"),
        *("olmo", "gpt_bigcode", "codegen", "persimmon", "nemotron"),
    ),
    "linear attention or a recurrence": (
        *("mamba", "mamba2", "falcon_mamba", "rwkv", "jamba", "bamba", "zamba2", "recurrent_gemma", "qwen3_next"),
        *("falcon_h1", "lfm2", "minimax", "qwen3_5_text", "qwen3_5"),
    ),
    "a recurrence or experts (dense ones are read as GGUF files)": ("granitemoehybrid",),
    "attention to pictures in its own layers": ("mllama", "mllama_text_model"),
    "rotary embedding with three axes": (
        tuple(kind + part for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl") for part in ("", "_text"))
    ),
}
_ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_ROPE_FACTORS: Final = {  # that must be given
    **dict.fromkeys(("linear", "dynamic"), ("factor",)),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_ROPE_ENTRIES: Final = {
    **{name: name for name in ("factor", "attention_factor", "low_freq_factor", "high_freq_factor")},
    **{name: name for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")},
    "short_factor": "short_factors",
    "long_factor": "long_factors",
}


class Described(NamedTuple):
    """What a `config.json` says about a decoder."""

    config: DecoderConfig
    biased: tuple[str, ...]  # matrices with a bias
    folds: Folds


def family_of(config: Entries, *, folder: Path) -> Family:
    """The family of a `config.json`. Raises CheckpointError for unknown families and for quantised weights."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        if kind in FOREIGN:
            raise CheckpointError(
                f"`{folder}` holds a model of type {kind!r}, which is run for texts only, by the package transformers",
                hint="`generate`, `serve` and `pipeline` take it, without adapter, training, export or LoRA",
            )
        if "auto_map" in config:
            raise code_error(folder)
        lack = next((f", which needs {lack}" for lack, kinds in _MISSING.items() if kind in kinds), "")
        raise CheckpointError(
            f"`{folder}` holds a model of type {shown_excerpt(str(kind))!r}{lack}; supported are {', '.join(FAMILIES)}"
            f"; for texts also {', '.join(FOREIGN)}",
            hint="pass the folder of a model of these families as --llama-dir",
        )
    check_floats(config, folder=folder)
    return FAMILIES[kind]


def check_floats(config: Entries, *, folder: Path) -> None:
    """Raise CheckpointError for quantised weights."""
    if quantised := config.get("quantization_config") or config.get("quantization"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise CheckpointError(
            f"The weights in `{folder}` are quantised ({shown_excerpt(str(method or 'MLX or an unknown format'))}), "
            "and such folders are not read",
            hint="use the folder with the model's float weights, or a GGUF file; `llama-adapter quantize` makes 8-bit "
            "and 4-bit weights",
        )


def code_error(folder: Path) -> CheckpointError:
    """The refusal of a model whose folder brings code."""
    return CheckpointError(
        f"The model in `{folder}` needs code of its own folder (`auto_map` in its config.json), which is never run",
        hint="use its form for the classes of transformers, such as `model_type` glm for ChatGLM, whose folders are "
        "often named -hf",
    )


def read_entries(config: Entries, family: Family, *, path: Path) -> dict[str, Any]:
    """The entries of a family, with defaults for those that the file leaves out.

    Raises CheckpointError for values of another kind, and for numbers that are not positive.
    """
    found = {name: config.get(name, default) for name, default in family.defaults.items()}
    heads = found["num_key_value_heads"]
    if isinstance(heads, list) and heads:  # one number for each layer
        if any(one != heads[0] for one in heads):
            raise CheckpointError(
                f"The layers of the model in `{path.parent}` have different numbers of key/value heads, which is not "
                "supported",
                hint="use a model whose num_key_value_heads is one number",
            )
        found["num_key_value_heads"] = heads[0]
    whole, real, others = [], [], []
    for name, value in found.items():
        default = family.defaults[name]
        may_be_null = default is None or name in ("num_key_value_heads", "sliding_window") or "softcapping" in name
        if value is None and not may_be_null:
            found[name] = value = default
        if value is None or (name == "max_window_layers" and value == 0):
            continue
        if type(default) is float or "softcapping" in name:
            real.append(name)
        elif type(default) is int or default is None:
            whole.append(name)
        elif not isinstance(value, (list, tuple) if default == () else type(default)):
            others.append(name)
    require_numbers(found, path=path, whole=whole, real=real, hint=MEANING)
    if others:
        raise CheckpointError(f"`{path}` has a value of another kind for {list_keys(others)}", hint=MEANING)
    return found


def describe(config: Entries, entries: Entries, family: Family, *, path: Path) -> Described:
    """The decoder of a `config.json` whose `entries` come from `read_entries`; there must be as many layers.

    Raises CheckpointError for impossible values, and for what no decoder here computes.
    """
    name = "hidden_activation" if "hidden_activation" in entries else "hidden_act"
    activation = _ACTIVATIONS.get(entries[name])
    if activation is None:
        raise CheckpointError(
            f"The model in `{path.parent}` uses the activation {shown_excerpt(entries[name])!r}; supported are "
            f"{', '.join(_ACTIVATIONS)}",
            hint="pass the folder of another model as --llama-dir",
        )
    looks_ahead = config.get("use_bidirectional_attention")
    if looks_ahead or config.get("is_causal") is False:
        found = "use_bidirectional_attention" if looks_ahead else "is_causal"
        raise CheckpointError(
            f"The tokens of the model in `{path.parent}` attend to later ones ({found}), so it cannot write text",
            hint="it makes embeddings; pass the folder of a model that generates",
        )
    layers = range(entries["num_hidden_layers"])
    slides = _sliding(entries, family, path=path)
    window = entries.get("sliding_window") if entries.get("use_sliding_window", True) else None
    rotaries = _rotaries(config, entries, family, path=path)
    turning = [family.rotates(entries, layer) for layer in layers]
    places = tuple(min(int(slides[layer]), len(rotaries) - 1) if turning[layer] else -1 for layer in layers)
    settings = {
        "vocab_size": entries["vocab_size"],
        "dim": entries["hidden_size"],
        "num_layers": entries["num_hidden_layers"],
        "num_heads": entries["num_attention_heads"],
        "num_kv_heads": entries["num_key_value_heads"] or 0,
        "head_dim": entries["head_dim"] or 0,
        "ffn_dim": entries["intermediate_size"],
        "norm_eps": float(entries["rms_norm_eps"]),
        "activation": activation,
        "score_cap": float(entries.get("attn_logit_softcapping") or 0),
        "logit_cap": float(entries.get("final_logit_softcapping") or 0),
        "rope_theta": rotaries[0].theta,
        "rotaries": () if len(rotaries) == 1 and rotaries[0].is_plain else rotaries,
        "layer_rotaries": places if any(places) else (),
        "layer_windows": tuple(window if slide else 0 for slide in slides) if window and any(slides) else (),
        **family.switches,
    }
    decoder = checked_config(path.parent, settings)
    _check_rotaries(decoder, path=path)
    biased = {*family.biased, *(name for entry, names in _BIASED.items() if entries.get(entry) for name in names)}
    return Described(decoder, tuple(name for name in MATRICES if name in biased), family.folds(entries, decoder))


def _sliding(entries: Entries, family: Family, *, path: Path) -> list[bool]:
    """Whether each layer has the sliding window, if there is one."""
    layers = range(entries["num_hidden_layers"])
    if short := [name for name in ("layer_types", "no_rope_layers") if 0 < len(entries.get(name, ())) < len(layers)]:
        raise CheckpointError(f"`{path}` has fewer values than layers for {list_keys(short)}", hint=MEANING)
    given = entries.get("layer_types") or ()
    kinds = {"full_attention": False, "sliding_attention": True}
    if unknown := [str(kind) for kind in given if not isinstance(kind, str) or kind not in kinds]:
        raise CheckpointError(
            f"The model in `{path.parent}` has layers of the type {list_keys(unknown[:1])}, which is not supported",
            hint=f"supported are {' and '.join(kinds)}",
        )
    return [kinds[given[layer]] if given else family.slides(entries, layer) for layer in layers]


def _rotaries(config: Entries, entries: Entries, family: Family, *, path: Path) -> tuple[Rotary, ...]:
    """The rotary embedding of layers that see everything and, if it differs, that of layers with a sliding window.

    Since version 5, transformers writes `rope_parameters`, flat or by type of layer, and before `rope_theta`,
    `rope_scaling` and, for Gemma 3, `rope_local_base_freq`.
    """
    spelled = {name: config.get(name) or {} for name in ("rope_parameters", "rope_scaling")}
    nested = [spelled["rope_parameters"]]
    if isinstance(nested[0], dict) and nested[0].keys() & {"full_attention", "sliding_attention"}:
        nested = [nested[0].get(name) or {} for name in ("full_attention", "sliding_attention")]
    elif family.local_theta:  # Gemma 3, for which transformers 5.24 ignores flat ones
        nested = [{}, {}]
    elif family.local_theta is not None and isinstance(nested[0], dict):  # OLMo 3, as transformers 5.0 to 5.12 wrote it
        nested.append({name: value for name, value in nested[0].items() if name == "rope_theta"})
    if not all(isinstance(one, dict) for one in (*nested, spelled["rope_scaling"])):
        raise CheckpointError(f"`{path}` has `rope_parameters` that are not an object", hint=MEANING)
    if spelled["rope_scaling"]:
        nested[0] = spelled["rope_scaling"] if len(nested) == 1 else nested[0] | spelled["rope_scaling"]
    top, *given = ({name: value for name, value in one.items() if value is not None} for one in (config, *nested))
    theta, share = top.get("rope_theta", family.theta), top.get("partial_rotary_factor", 1.0)
    bases = (theta, top.get("rope_local_base_freq", family.local_theta or theta))
    return tuple(
        _rotary({"partial_rotary_factor": share, "rope_theta": base, **one}, entries, path=path)
        for one, base in zip(given, bases, strict=False)
    )


def _rotary(values: Entries, entries: Entries, *, path: Path) -> Rotary:
    kind = values.get("rope_type", values.get("type", "default"))
    context, original = entries["max_position_embeddings"], entries.get("original_max_position_embeddings")
    if "short_factor" in values and kind in ("su", "yarn"):
        kind = "longrope"  # its first names in Phi-3
    if kind not in _ROPE_TYPES:
        raise CheckpointError(
            f"`{path}` names the rotary embedding {shown_excerpt(str(kind))!r}; supported are {', '.join(_ROPE_TYPES)}",
            hint="pass the folder of another model as --llama-dir",
        )
    require_numbers(values, path=path, whole=(), real=("rope_theta", *_ROPE_FACTORS.get(kind, ())), hint=MEANING)
    settings = {"theta": float(values["rope_theta"]), "share": values["partial_rotary_factor"]}
    if kind != "default":
        is_told = kind in ("llama3", "yarn", "longrope")
        trained = (original or values.get("original_max_position_embeddings", context)) if is_told else context
        longest = trained if values.get("factor") == 1 else context  # a factor of 1 is none for `Rotary`
        settings |= {ours: values[theirs] for theirs, ours in _ROPE_ENTRIES.items() if theirs in values}
        settings |= {"scaling": kind, "longest_context": longest, "original_context": trained}
    if wrong := [name for name in ("short_factor", "long_factor") if not _are_numbers(values.get(name, []))]:
        raise CheckpointError(f"`{path}` has a value of another kind for {list_keys(wrong)}", hint=MEANING)
    try:
        return Rotary(**settings)
    except (TypeError, ValueError) as error:
        raise _impossible(path, error) from None


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(one) in (int, float) for one in value)


def _check_rotaries(config: DecoderConfig, *, path: Path) -> None:
    """Raise CheckpointError for scalings that give no finite angles, such as one with too few factors."""
    for rotary in config.rotaries:
        try:
            with np.errstate(all="ignore"):
                tables = [rotary.frequencies(config.head_dim, context=one) for one in (1, rotary.longest_context + 1)]
        except (TypeError, ValueError, ArithmeticError) as error:
            raise _impossible(path, error) from None
        if not all(np.isfinite(table).all() for pair in tables for table in pair):
            raise _impossible(path)


def _impossible(path: Path, reason: Exception | None = None) -> CheckpointError:
    said = str(reason) if isinstance(reason, ValueError) else "its numbers give no angles"
    return CheckpointError(f"`{path}` describes an impossible rotary embedding: {said}", hint=MEANING)
