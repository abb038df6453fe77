"""Toy models of families that transformers computes, saved as folders with a tokenizer."""

import functools
import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from llama_adapter.llm.pieces.json_pieces import LETTERS

_SIZES = {"vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
_MORE = {**_SIZES, "intermediate_size": 64, "max_position_embeddings": 256}
_KEYS = {**_MORE, "num_key_value_heads": 3, "head_dim": 8, "pad_token_id": 0}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
# `model_type` -> its class of configurations, and entries.
TOYS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("Bloom", _SIZES),
    "gpt2": ("GPT2", {"vocab_size": 300, "n_positions": 256, "n_embd": 48, "n_layer": 3, "n_head": 6}),
    "gpt_neo": (
        "GPTNeo",
        {
            **_SIZES,
            "num_layers": 3,
            "num_heads": 6,
            "window_size": 5,
            "attention_types": [[["global", "local", "global"], 1]],
        },
    ),
    "gptj": ("GPTJ", {"vocab_size": 300, "n_positions": 256, "n_embd": 48, "n_layer": 3, "n_head": 6, "rotary_dim": 4}),
    "gpt_neox": ("GPTNeoX", _MORE),
    "opt": ("OPT", {**_MORE, "ffn_dim": 64, "word_embed_proj_dim": 48}),
    "glm": ("Glm", _KEYS),
    "glm4": ("Glm4", _KEYS),
    "gpt_oss": (
        "GptOss",
        {
            **_KEYS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "layer_types": _MIXED,
        },
    ),
}
END = 299
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"


@functools.cache
def model_of(kind: str, **sizes: int) -> Any:
    """A model of transformers with random weights."""
    name, entries = TOYS[kind]
    ids = {"bos_token_id": 298, "eos_token_id": END}
    config = getattr(transformers, f"{name}Config")(**{**entries, **ids, **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                # Small embeddings, because otherwise the head would repeat the last token where both are tied.
                parameter.normal_(std=0.1 if "embed" in parameter_name or "wte" in parameter_name else 0.3)
    return model


def save(kind: str, folder: Path, *, chats: bool = False, **sizes: int) -> Path:
    """Save a toy with a tokenizer of its 300 tokens; the first 256 are bytes."""
    model_of(kind, **sizes).save_pretrained(folder)
    vocabulary = {letter: place for place, letter in enumerate(LETTERS)}
    vocabulary |= {f"<{place}>": place for place in range(256, 300)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([f"<{END}>"])
    made.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": f"<{END}>", **({"chat_template": TEMPLATE} if chats else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
