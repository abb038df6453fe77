"""The tokenizer inside a GGUF file, as the content of a `tokenizer.json`, the format of Hugging Face's `tokenizers`.

Keys: `tokenizer.ggml.*` of ggml's `gguf.md`. A file names its pre-tokenizer and does not describe it; the patterns here
are those of the models' own `tokenizer.json`, as llama.cpp's `llama-vocab.cpp` quotes them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.text import shown_excerpt

_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4  # types of tokens
_BLANK: Final = "\u2581"  # stands for a space in the pieces of SentencePiece
_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST: Final = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS: Final = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST
_CASES: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
    r"\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _REST
)
_LLAMA_3: Final = _WORDS % "{1,3}"
# Pre-tokenizer -> its pattern. Empty: that of GPT-2, which `tokenizers` has. "digits": single digits, then GPT-2's.
_PATTERNS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("gpt-2", "olmo"), ""),
    **dict.fromkeys(("smollm", "refact", "starcoder"), "digits"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), _LLAMA_3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _WORDS % ""),
    "gpt-4o": _CASES % (f"{_ENDINGS}?", f"{_ENDINGS}?", "{1,3}"),
    "tekken": _CASES % ("", "", ""),
}
_WHOLE_WORDS: Final = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word in the vocabulary is not merged from parts
_NFC: Final = ("qwen2", "deepseek-r1-qwen")
# Tokens that end an answer. Many files name only one of a model's.
_ENDS: Final = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
)
_UNSTRIPPED: Final = (
    "<unk>",
    "<s>",
    "<|endoftext|>",
)  # of Phi-3, whose other tokens swallow the white space after them
_HINT: Final = "convert the model again, or pass a folder in Hugging Face's format with its `tokenizer.json`"


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTokenizer:
    """The tokenizer of a GGUF file. `data` is a `tokenizer.json`, whose post-processor adds the begin token."""

    data: bytes
    bos_id: int | None
    end_ids: tuple[int, ...]  # any of them ends an answer; the first is the one that the file names
    template: str | None  # of chats, in Jinja


def gguf_tokenizer(keys: Mapping[str, Any], *, name: str) -> GgufTokenizer:
    """The tokenizer in the keys of a GGUF file. `name` is used in messages.

    Raises CheckpointError for missing or contradicting keys, and for kinds of tokenizers that are not known.
    """
    found = _Keys(keys, name)
    tokens, types = found.tokens, found.types
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        raise found.wrong("has a token twice in its vocabulary")
    kind, is_phi = found.text("model"), found.keys.get("general.architecture") == "phi3"
    added = [
        {
            **{"id": number, "content": tokens[number], "single_word": False, "lstrip": False},
            "rstrip": is_phi and kind == "llama" and tokens[number] not in _UNSTRIPPED,
            **{"normalized": False, "special": int(types[number]) != _USER},
        }
        for number in np.flatnonzero(np.isin(types, (_UNKNOWN, _CONTROL, _USER))).tolist()
    ]
    if kind == "gpt2":
        parts = _byte_level(found, ids)
    elif kind == "llama":
        parts = _sentencepiece(found, ids)
    else:
        raise found.wrong(f"has a tokenizer of the kind {shown_excerpt(str(kind))!r}, and gpt2 and llama are known")
    bos_id = found.id_of("bos", 1 if kind == "llama" else None)
    content = {
        **{"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts},
        "post_processor": _begin(tokens[bos_id], bos_id) if found.begins(kind) and bos_id is not None else None,
    }
    named = (found.id_of("eos", 2 if kind == "llama" else None), found.id_of("eot", None), found.id_of("eom", None))
    spelled = [ids[end] for end in _ENDS if end in ids and types[ids[end]] in (_CONTROL, _USER)]
    template = keys.get("tokenizer.chat_template")
    return GgufTokenizer(
        data=json.dumps(content, ensure_ascii=False).encode(),
        bos_id=bos_id,
        end_ids=tuple(dict.fromkeys(end for end in (*named, *spelled) if end is not None)),
        template=template if isinstance(template, str) else None,
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

    def id_of(self, which: str, default: int | None) -> int | None:
        value = self.get(f"{which}_token_id")
        value = default if value is None else value
        if value is not None and (type(value) is not int or not 0 <= value < len(self.tokens)):
            raise self.wrong(f"has a tokenizer.ggml.{which}_token_id outside its vocabulary")
        return value

    def begins(self, kind: str) -> bool:
        """Whether a text begins with the begin token."""
        stated = self.get("add_bos_token")
        return stated if isinstance(stated, bool) else kind == "llama" or self.get("pre") in _WHOLE_WORDS


def _byte_level(keys: _Keys, ids: Mapping[str, int]) -> dict[str, Any]:
    """The parts of a BPE over bytes, as in GPT-2."""
    pre = keys.text("pre")
    pattern = _PATTERNS.get(pre)
    if pattern is None:
        raise keys.wrong(f"has the pre-tokenizer {shown_excerpt(pre)!r}, and known are {', '.join(_PATTERNS)}")
    merges = [merge.split(" ") for merge in keys.texts("merges")]
    if not all(len(merge) == 2 for merge in merges):
        raise keys.wrong("has merges that are not two tokens each")
    plain = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": pattern in ("", "digits"),
    }
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    first = [] if not pattern else [{"type": "Digits", "individual_digits": True} if pattern == "digits" else split]
    model = {"type": "BPE", "ignore_merges": pre in _WHOLE_WORDS, "vocab": ids, "merges": merges}
    return {
        "normalizer": {"type": "NFC"} if pre in _NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*first, plain]},
        "model": model,
        "decoder": {**plain, "use_regex": True},
    }


def _sentencepiece(keys: _Keys, ids: Mapping[str, int]) -> dict[str, Any]:
    """The parts of SentencePiece's BPE. It stores no merges: pieces with high scores are joined first.

    A merge is every way to cut a piece into two pieces. In Gemma, pieces with low ids are joined first.
    """
    is_gemma = str(keys.keys.get("general.architecture")).startswith("gemma")
    order = np.arange(len(ids)) if is_gemma else np.argsort(-keys.numbers("scores"), kind="stable")
    joined = np.isin(keys.types, (_NORMAL, _USER))
    pieces = {piece: number for piece, number in ids.items() if joined[number]}
    merges: list[tuple[str, str]] = []
    for number in order[joined[order]].tolist():
        piece = keys.tokens[number]
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        known = [(left, right) for left, right in cuts if left in pieces and right in pieces]
        merges += sorted(known, key=lambda parts: (pieces[parts[0]], pieces[parts[1]]))
    unknown = keys.id_of("unknown", 0) or 0
    blanks: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}]
    ends: list[dict[str, Any]] = []
    if keys.get("add_space_prefix") is not False:
        blanks.insert(0, {"type": "Prepend", "prepend": _BLANK})
        ends.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    spaces = {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": blanks},
        "pre_tokenizer": None,
        "model": {
            **{"type": "BPE", "unk_token": keys.tokens[unknown], "fuse_unk": True, "byte_fallback": True},
            **{"vocab": ids, "merges": merges},
        },
        "decoder": {"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *ends]},
    }


def _begin(token: str, number: int) -> dict[str, Any]:
    """The post-processor that puts the begin token before a text."""
    begin = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": kind}} for name, kind in (("A", 0), ("B", 1)))
    known = {token: {"id": token, "ids": [number], "tokens": [token]}}
    return {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [begin, first, second],
        "special_tokens": known,
    }
