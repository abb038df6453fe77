"""The tokenizer inside a GGUF file, made a `tokenizer.json`. Keys: `tokenizer.ggml.*` of ggml's `gguf.md`.

A file names its pre-tokenizer and does not describe it; which pattern a name means is stated in llama.cpp's
`llama-vocab.cpp`.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from llama_adapter.llm.pieces.folder import TokenizerSettings
from llama_adapter.llm.pieces.made_json import (
    GPT_2,
    GPT_4O,
    LLAMA_3,
    QWEN,
    TEKKEN,
    added_token,
    begun_by,
    byte_level,
    merges_of,
)
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.text import shown_excerpt

_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4  # types of tokens
_BLANK: Final = "\u2581"  # stands for a space in the pieces of SentencePiece
_SINGLE_DIGITS: Final = ("smollm", "refact", "starcoder")
_LLAMA_3_NAMES: Final = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0")
_WHOLE_WORDS: Final = (*_LLAMA_3_NAMES, "tekken")
_NFC: Final = ("qwen2", "deepseek-r1-qwen")
_PATTERNS: Final[Mapping[str, str]] = {
    **dict.fromkeys((*_SINGLE_DIGITS, "gpt-2", "olmo", "mellum", "a.x-4.0"), GPT_2),
    **dict.fromkeys((*_LLAMA_3_NAMES, "dbrx", "smaug-bpe"), LLAMA_3),
    **dict.fromkeys(_NFC, QWEN),
    **{"gpt-4o": GPT_4O, "tekken": TEKKEN},
}
# Tokens that end an answer. Many files name only one of a model's.
_ENDS: Final = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>"),
    *("<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
)
_UNSTRIPPED: Final = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3, whose other tokens take the white space after them
_NAMED: Final = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_LLAMA_IDS: Final = {"bos": 1, "eos": 2, "unknown": 0}  # where a file of the kind `llama` states none
# Kinds of files without a language model, and what to do about each.
_NO_MODELS: Final = {
    "mmproj": ("a picture tower (mmproj)", "name a text model; those that see are folders in Hugging Face's format"),
    "adapter": ("a LoRA (adapter)", "name PEFT's folder of it as --lora, and the model that it changes as --llama-dir"),
    "imatrix": ("an importance matrix", "name the file of a model, which was quantised with it"),
}
_HINT: Final = "convert the model again, or pass a folder in Hugging Face's format with its `tokenizer.json`"


def check_kind(keys: Mapping[str, Any], *, name: str) -> None:
    """Raise CheckpointError for the keys of a GGUF file without a language model."""
    kind = "mmproj" if keys.get("general.architecture") == "clip" else str(keys.get("general.type"))
    if kind in _NO_MODELS:
        what, hint = _NO_MODELS[kind]
        raise CheckpointError(f"`{name}` is {what}, which is not read here", hint=hint)


def keys_to_json(keys: Mapping[str, Any], *, name: str) -> tuple[bytes, TokenizerSettings]:
    """The `tokenizer.json` for the keys of a GGUF file, and the settings in them. `name` is used in messages.

    Raises CheckpointError for missing or contradicting keys, and for kinds of tokenizers that are not known.
    """
    check_kind(keys, name=name)
    found = _Keys(keys, name)
    tokens, types, kind = found.tokens, found.types, found.text("model")
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        raise found.wrong("has a token twice in its vocabulary")
    if kind not in ("gpt2", "llama"):
        raise found.wrong(f"has a tokenizer of the kind {shown_excerpt(kind)!r}; gpt2 and llama are supported")
    takes_right = kind == "llama" and keys.get("general.architecture") == "phi3"
    content = {
        "version": "1.0",
        "added_tokens": [
            added_token(
                tokens[number],
                number,
                special=int(types[number]) != _USER,
                takes_right=takes_right and tokens[number] not in _UNSTRIPPED,
            )
            for number in np.flatnonzero(np.isin(types, (_UNKNOWN, _CONTROL, _USER))).tolist()
        ],
        **(_byte_level(found, ids) if kind == "gpt2" else _sentencepiece(found, ids)),
    }
    stated = {which: found.id_of(which, _LLAMA_IDS.get(which) if kind == "llama" else None) for which in _NAMED}
    begins = found.get("add_bos_token")
    if not isinstance(begins, bool):
        begins = kind == "llama" or found.get("pre") in _WHOLE_WORDS
    if stated["bos"] is not None and begins:
        content["post_processor"] = begun_by(tokens[stated["bos"]], stated["bos"])
    spelled = (ids[end] for end in _ENDS if end in ids and types[ids[end]] in (_CONTROL, _USER))
    ends = dict.fromkeys((stated["eos"], found.id_of("eot"), found.id_of("eom"), *spelled))
    template = keys.get("tokenizer.chat_template")
    return json.dumps(content, ensure_ascii=False).encode(), TokenizerSettings(
        end_ids=tuple(end for end in ends if end is not None),
        chat_template=template if isinstance(template, str) and template else None,
        names={_NAMED[which]: tokens[number] for which, number in stated.items() if number is not None},
    )


class _Keys:
    """The keys of a tokenizer, checked when they are read."""

    def __init__(self, keys: Mapping[str, Any], name: str) -> None:
        self.keys, self.name = keys, name
        self.tokens: list[str] = self.texts("tokens")
        self.types = self.numbers("token_type", np.full(len(self.tokens), _NORMAL))

    def wrong(self, problem: str) -> CheckpointError:
        return CheckpointError(f"`{self.name}` {problem}", hint=_HINT)

    def get(self, key: str) -> Any:
        return self.keys.get(f"tokenizer.ggml.{key}")

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise self.wrong(f"has no text as tokenizer.ggml.{key}")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list) or not value:
            raise self.wrong(f"has no list of texts as tokenizer.ggml.{key}")
        return value

    def numbers(self, key: str, default: np.ndarray | None = None) -> np.ndarray:
        """A number for each token."""
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, np.ndarray) or len(value) != len(self.tokens):
            raise self.wrong(f"has no number for each token as tokenizer.ggml.{key}")
        return value

    def id_of(self, which: str, default: int | None = None) -> int | None:
        value = self.get(f"{which}_token_id")
        value = default if value is None else value
        if value is not None and (type(value) is not int or not 0 <= value < len(self.tokens)):
            raise self.wrong(f"has a tokenizer.ggml.{which}_token_id outside its vocabulary")
        return value


def _byte_level(keys: _Keys, ids: Mapping[str, int]) -> dict[str, Any]:
    """The parts of a BPE over bytes."""
    pre = keys.text("pre")
    if pre not in _PATTERNS:
        raise keys.wrong(f"has the pre-tokenizer {shown_excerpt(pre)!r}; supported are {', '.join(_PATTERNS)}")
    merges = [merge.split(" ") for merge in keys.texts("merges")]
    if not all(len(merge) == 2 for merge in merges):
        raise keys.wrong("has merges that are not two tokens each")
    digits, whole = pre in _SINGLE_DIGITS, pre in _WHOLE_WORDS
    parts = byte_level(ids, merges, pattern=_PATTERNS[pre], ignore_merges=whole, single_digits=digits)
    return {"normalizer": {"type": "NFC"} if pre in _NFC else None, **parts}


def _sentencepiece(keys: _Keys, ids: Mapping[str, int]) -> dict[str, Any]:
    """The parts of SentencePiece's BPE. It joins pieces with high scores first; in Gemma, pieces with low ids."""
    is_gemma = str(keys.keys.get("general.architecture")).startswith("gemma")
    order = np.arange(len(ids)) if is_gemma else np.argsort(-keys.numbers("scores"), kind="stable")
    is_text = np.isin(keys.types, (_NORMAL, _USER))
    pieces = {piece: number for piece, number in ids.items() if is_text[number]}
    merges = merges_of((keys.tokens[number] for number in order[is_text[order]].tolist()), pieces)
    unknown = keys.tokens[keys.id_of("unknown", 0) or 0]
    model = {"type": "BPE", "unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    before: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}]
    after: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": _BLANK}, "content": " "}]
    after += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    prefixed = keys.get("add_space_prefix")
    if prefixed or (prefixed is None and not is_gemma):  # Ollama's files of Gemma do not say so
        before.insert(0, {"type": "Prepend", "prepend": _BLANK})
        after.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": before},
        "model": {**model, "vocab": ids, "merges": merges},
        "decoder": {"type": "Sequence", "decoders": after},
    }
