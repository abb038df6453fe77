"""The pieces of a `tokenizer.json`, run by the package `tokenizers`: Llama 3, Qwen, Gemma, SmolLM and most others."""

import functools
import itertools
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llama_adapter.llm.pieces.base import TOKENIZER_FILES, Mark
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.text import shown_excerpt

if TYPE_CHECKING:
    import tokenizers

_PROBE = "a"
_OF_NEIGHBOURS = {"BPEDecoder", "CTC"}  # decoders that are not read
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class JsonPieces:
    """The pieces of a `tokenizer.json`, with the attributes and methods of `SentencePieces`.

    The package's objects have a setting for names of special tokens in a text: their ids, or ordinary text. It belongs
    to the object, so there is one object that reads ids and up to two that read text, which share their vocabulary.
    """

    file_name = TOKENIZER_FILES[1]

    def __init__(self, data: bytes, *, name: str, chat_template: str | None = None) -> None:
        """Read a file. `name` is used in messages.

        Marks are the special tokens, and those that are not special although `chat_template` writes them, such as
        `<think>`. Raises CheckpointError if the bytes are not a `tokenizer.json`.
        """
        from tokenizers import Tokenizer

        try:
            whole = Tokenizer.from_str(data.decode())
        except BaseException as error:  # a panic of the package is no Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise CheckpointError(
                f"`{name}` is no tokenizer.json: {shown_excerpt(str(error))}",
                hint="the file is damaged, truncated or of a newer release of the package tokenizers; copy it again",
            ) from None
        whole.no_truncation()
        whole.no_padding()
        self._whole = whole
        self._added = whole.get_added_tokens_decoder()
        self.num_ids = max(whole.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        template = chat_template or ""
        self.marks: Mapping[str, Mark] = {
            token.content: Mark(
                id=token_id, is_special=token.special, takes_left=token.lstrip, takes_right=token.rstrip
            )
            for token_id, token in self._added.items()
            # A run of blanks is a token of ordinary text, also if a template has one.
            if token.special or (token.content.strip() and token.content in template)
        }
        kinds = {str(part.get("type")) for part in _parts(_state(whole.decoder))}
        if unread := kinds & _OF_NEIGHBOURS:
            raise CheckpointError(
                f"`{name}` has the decoder {unread.pop()}, by which a token's text depends on the tokens beside it",
                hint="it belongs to no model that is read here; copy the tokenizer that came with the weights",
            )
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_fallback = "ByteFallback" in kinds
        self.byte_errors = "replace" if self._is_byte_level else "replace-byte"
        self.is_exact = self._is_byte_level
        self._text = _reading_text(whole, marks=self.marks)
        self._inner = self._text
        if (inner := _without_first_blank(whole.pre_tokenizer)) is not None:
            self._inner = _reading_text(whole, marks=self.marks)
            self._inner.pre_tokenizer = inner
        plain, surrounded = self.encode(_PROBE), whole.encode(_PROBE).ids
        at = next((at for at in range(len(surrounded)) if surrounded[at : at + len(plain)] == plain), 0)
        self.begin_ids = tuple(surrounded[:at])
        self.bos_id = self.begin_ids[0] if self.begin_ids else None
        self.end_ids: tuple[int, ...] = ()
        unknown = getattr(whole.model, "unk_token", None)
        self.unknown_id = None if unknown is None else whole.token_to_id(unknown)

    def encode(self, text: str, *, is_inner: bool = False) -> list[int]:
        """As `SentencePieces.encode`."""
        ids: list[int] = (self._inner if is_inner else self._text).encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """As `SentencePieces.decode`. Invalid bytes of a byte-level vocabulary give U+FFFD."""
        if self._is_byte_level:
            return b"".join(self.bytes_of(one) or b"" for one in ids).decode("utf-8", self.byte_errors)
        text: str = self._whole.decode(list(ids))
        return text

    def text_inside(self, piece_id: int) -> str:
        """As `SentencePieces.text_inside`."""
        before, num_before = self._before
        return self.decode([before, piece_id])[num_before:]

    @functools.cached_property
    def _before(self) -> tuple[int, int]:
        """A piece that stands for the text before another one, and the length of its text."""
        lengths = ((one, len(self.decode([one]))) for one in range(self.num_ids) if self.bytes_of(one) is None)
        return next((both for both in lengths if both[1]), (0, 0))

    def bytes_of(self, piece_id: int) -> bytes | None:
        """As `SentencePieces.bytes_of`. All pieces of a byte-level vocabulary are bytes."""
        if piece_id in self._added and self._added[piece_id].special:
            return b""
        name = self._whole.id_to_token(piece_id)
        if name is None:
            return b""
        if self._is_byte_level:
            values = [_BYTE_OF_LETTER.get(letter) for letter in name]
            return name.encode() if None in values else bytes(values)  # type: ignore[arg-type]
        byte = _BYTE.fullmatch(name) if self._has_byte_fallback else None
        return None if byte is None else bytes.fromhex(byte[1])

    def id_of(self, name: str) -> int | None:
        """As `SentencePieces.id_of`."""
        found: int | None = self._whole.token_to_id(name)
        return found

    def name_of(self, piece_id: int) -> str:
        """As `SentencePieces.name_of`. A part of a character in a byte-level vocabulary has the names of its bytes."""
        if self._is_byte_level and (content := self.bytes_of(piece_id)):
            return "".join(f"<0x{byte:02X}>" for byte in content)
        return self._whole.id_to_token(piece_id) or f"<{piece_id}>"


def without_unused(data: bytes, *, num_rows: int, is_written: Callable[[str], bool]) -> bytes:
    """A valid `tokenizer.json` without its last special tokens, beyond the `num_rows` of a model, that nothing writes.

    `is_written` takes a token's name. Tokens that the file's own `post_processor` writes are kept too, and all before
    a kept one, because the package gives tokens the next free ids. Gemma 3's models for texts have a token for pictures
    that is left out, and many folders one for padding.
    """
    content = json.loads(data)
    own, added = json.dumps(content.get("post_processor"), ensure_ascii=False), content.get("added_tokens", [])
    needed = [
        one["id"]
        for one in added
        if one["id"] < num_rows or not one["special"] or one["content"] in own or is_written(one["content"])
    ]
    kept = [one for one in added if one["id"] <= max(needed, default=-1)]
    return json.dumps({**content, "added_tokens": kept}, ensure_ascii=False).encode() if kept != added else data


def _reading_text(whole: "tokenizers.Tokenizer", *, marks: Collection[str]) -> "tokenizers.Tokenizer":
    """A tokenizer for text in which marks are ordinary text. It shares the vocabulary of `whole`."""
    from tokenizers import AddedToken, Tokenizer

    made = Tokenizer(whole.model)
    for part in ("normalizer", "pre_tokenizer"):
        if (own := getattr(whole, part)) is not None:
            setattr(made, part, own)
    # In the order of their ids, because those outside the model's vocabulary get the next free one.
    added = (token for _, token in sorted(whole.get_added_tokens_decoder().items()))
    for is_mark, tokens in itertools.groupby(added, key=lambda token: token.content in marks):
        options = ("single_word", "lstrip", "rstrip", "normalized")
        copies = [AddedToken(one.content, **{name: getattr(one, name) for name in options}) for one in tokens]
        (made.add_special_tokens if is_mark else made.add_tokens)(copies)
    made.encode_special_tokens = True
    return made


def _without_first_blank(pre_tokenizer: Any) -> Any:
    """A copy of a pre-tokenizer that puts no blank before a text; None if it puts none only at the first place."""
    from tokenizers import Tokenizer

    state = _state(pre_tokenizer)
    firsts = [part for part in _parts(state) if part.get("prepend_scheme") == "first"]
    for part in firsts:
        part["prepend_scheme"] = "never"
    empty = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}, "pre_tokenizer": state}
    return Tokenizer.from_str(json.dumps(empty)).pre_tokenizer if firsts else None


def _state(component: Any) -> dict[str, Any]:
    """The JSON of a component of a tokenizer; {} if there is none."""
    return {} if component is None else dict(json.loads(component.__getstate__()))


def _parts(state: dict[str, Any]) -> list[dict[str, Any]]:
    """A component and, of a sequence, its parts."""
    inner = state.get("pretokenizers", state.get("decoders", []))
    return [state, *(found for part in inner for found in _parts(part))]


def _letters() -> dict[str, int]:
    """The alphabet of byte-level vocabularies, since GPT-2: letter -> byte. Bytes without a printable letter come last.

    See `bytes_to_unicode` of Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_LETTER = _letters()
LETTERS = "".join(sorted(_BYTE_OF_LETTER, key=lambda letter: _BYTE_OF_LETTER[letter]))  # letter of each byte
