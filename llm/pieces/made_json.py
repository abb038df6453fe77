"""Parts of a `tokenizer.json`, for tokenizers that are stored in another form."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

# Patterns by which texts are cut into words: those of the models' own files.
_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST: Final = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS: Final = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST
_CASES: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
    r"\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _REST
)
LLAMA_3: Final = _WORDS % "{1,3}"
QWEN: Final = _WORDS % ""
GPT_4O: Final = _CASES % (f"{_ENDINGS}?", f"{_ENDINGS}?", "{1,3}")
TEKKEN: Final = _CASES % ("", "", "")
GPT_2: Final = ""  # which `tokenizers` has


def added_token(content: str, number: int, *, special: bool = True, takes_right: bool = False) -> dict[str, Any]:
    """A token that is found in a text before the text is cut; `takes_right`: with the white space behind it."""
    flags = {"single_word": False, "lstrip": False, "rstrip": takes_right, "normalized": False, "special": special}
    return {"id": number, "content": content, **flags}


def begun_by(token: str, number: int) -> dict[str, Any]:
    """The post-processor that puts a token before a text."""
    begin, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def merges_of(pieces: Iterable[str], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """All ways to cut pieces into two that have an id. The first of `pieces` are joined first."""
    merges: list[tuple[str, str]] = []
    for piece in pieces:
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        known = [(left, right) for left, right in cuts if left in ids and right in ids]
        merges += sorted(known, key=lambda parts: (ids[parts[0]], ids[parts[1]]))
    return merges


def byte_level(
    vocab: Mapping[str, int],
    merges: Collection[Collection[str]],
    *,
    pattern: str,
    ignore_merges: bool = False,
    single_digits: bool = False,
) -> dict[str, Any]:
    """Pre-tokenizer, model and decoder of a BPE over bytes (Radford et al., 2019).

    `ignore_merges`: a word in the vocabulary is not merged from parts. `single_digits`: digits are cut apart first.
    """
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not pattern}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    digits = {"type": "Digits", "individual_digits": True}
    steps = [*([digits] if single_digits else []), *([split] if pattern else []), by_bytes]
    return {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": {"type": "BPE", "ignore_merges": ignore_merges, "vocab": vocab, "merges": merges},
        "decoder": by_bytes,
    }
