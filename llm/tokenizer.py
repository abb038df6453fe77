"""A model's tokenizer: text to ids and back, as a whole or as a stream, and what its folder says about its use."""

import codecs
import dataclasses
import functools
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from llama_adapter.llm.picture_format import IN_PICTURES
from llama_adapter.llm.pieces.base import Mark
from llama_adapter.llm.pieces.byte_ranks import END_IDS, is_byte_ranks, ranks_to_json
from llama_adapter.llm.pieces.folder import (
    JSON_MAKER,
    SETTINGS_FILE,
    TokenizerSettings,
    read_bytes,
    stored_name,
    stored_settings,
)
from llama_adapter.llm.pieces.gguf_keys import keys_to_json
from llama_adapter.llm.pieces.json_pieces import JsonPieces, without_unused
from llama_adapter.llm.pieces.sentence_pieces import SentencePieces
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.gguf_names import is_gguf
from llama_adapter.runtime.text import shown_excerpt


class Tokenizer:
    """A tokenizer of any kind. Immutable and thread-safe.

    `data` is the content of its file, `vocab_size` is its highest id and one. `begin_ids` begin a text; `bos_id` is the
    token for that, None if the file names none. Each of `end_ids` ends a text.
    """

    def __init__(
        self, pieces: SentencePieces | JsonPieces, data: bytes, settings: TokenizerSettings | None = None
    ) -> None:
        """Wrap the pieces of a file with the content `data`; use `load` or `from_bytes`."""
        self.pieces, self.data, self.settings = pieces, data, settings or TokenizerSettings()
        self.vocab_size, self.bos_id = pieces.num_ids, pieces.bos_id
        # A tokenizer.json says itself what begins a text; the setting beside it does not count in transformers 5.
        begins = not isinstance(pieces, SentencePieces) or self.settings.begins is not False
        self.begin_ids = pieces.begin_ids if begins else ()
        ids = dict.fromkeys((*pieces.end_ids, *self.settings.end_ids))
        named = self.settings.names.get("eos_token")
        if named is not None and (named_id := pieces.id_of(named)) is not None:
            ids[named_id] = None
        known = [one for one in ids if 0 <= one < self.vocab_size]
        # Some old configurations call the begin id an end. It is one only where both are the same token.
        self.end_ids: tuple[int, ...] = tuple(one for one in known if one != self.bos_id) or tuple(known)

    @classmethod
    def load(cls, path: str | os.PathLike[str], settings: TokenizerSettings | None = None) -> "Tokenizer":
        """Read a `tokenizer.model`, a `tokenizer.json` or a GGUF file, which has settings of its own inside.

        `settings` are those of `read_settings`; a GGUF file takes their chat template if it has none. Raises
        CheckpointError if the file is missing, unreadable or no tokenizer, if no token ends a text, or if the file
        lacks the one that the settings name.
        """
        if is_gguf(Path(path)):
            from llama_adapter.runtime.tensor_files.gguf_files import read_gguf  # imports torch

            data, own = keys_to_json(read_gguf(Path(path)).keys, name=str(path))
            template = own.chat_template or (settings.chat_template if settings else None)
            settings = dataclasses.replace(own, chat_template=template)
        else:
            data = read_bytes(Path(path))
        tokenizer = cls.from_bytes(data, name=str(path), settings=settings)
        end = tokenizer.settings.names.get("eos_token")
        if end and isinstance(tokenizer.pieces, SentencePieces) and tokenizer.pieces.id_of(end) is None:
            raise CheckpointError(
                f"`{path}` lacks the token {shown_excerpt(end)!r}, by which its tokenizer_config.json ends a text",
                hint=tokenizer.lacking_hint,
            )
        return tokenizer

    @classmethod
    def load_stored(cls, folder: str | os.PathLike[str], names: Collection[str]) -> "Tokenizer":
        """The tokenizer whose `files` were written into a folder that has the files `names`.

        Raises the CheckpointError of `from_bytes`.
        """
        place = Path(folder)
        settings = stored_settings(place) if SETTINGS_FILE in names else None
        file = place / stored_name(names)
        return cls.from_bytes(read_bytes(file), name=str(file), settings=settings)

    @classmethod
    def from_bytes(
        cls, data: bytes, *, name: str = "tokenizer.model", settings: TokenizerSettings | None = None
    ) -> "Tokenizer":
        """Tokenizer from the bytes of a file: a SentencePiece model, a `tokenizer.json`, or Llama 3's table of ranks.

        `name` is used in messages. Raises CheckpointError if the bytes are none of these, or if no token ends a text.
        """
        settings, data = settings or TokenizerSettings(), data.removeprefix(codecs.BOM_UTF8)
        if is_byte_ranks(data):
            data = ranks_to_json(data, name=name)
            settings = dataclasses.replace(settings, end_ids=settings.end_ids or END_IDS)
        pieces: SentencePieces | JsonPieces
        if data.lstrip()[:1] == b"{":
            pieces = JsonPieces(data, name=name, chat_template=settings.chat_template)
            if settings.num_rows is not None and pieces.num_ids > settings.num_rows:
                data = without_unused(
                    data, num_rows=settings.num_rows, is_written=lambda one: _is_written(one, settings)
                )
                pieces = JsonPieces(data, name=name, chat_template=settings.chat_template)
        else:
            pieces = SentencePieces(data, name=name)
        tokenizer = cls(pieces, data, settings)
        if not tokenizer.end_ids:
            raise CheckpointError(
                f"Nothing says which token of `{name}` ends a text",
                hint="copy the model's `generation_config.json` and `tokenizer_config.json` into its folder too",
            )
        return tokenizer

    @property
    def files(self) -> dict[str, bytes]:
        """The files from which `load_stored` makes this tokenizer: name -> content."""
        found = {self.pieces.file_name: self.data}
        begin = {} if self.begin_ids == self.pieces.begin_ids else {"add_bos_token": bool(self.begin_ids)}
        if begin or self.settings.chat_template is not None or self.end_ids != self.pieces.end_ids:
            chat = {} if self.settings.chat_template is None else {"chat_template": self.settings.chat_template}
            added = {str(self.settings.added[name]): {"content": name} for name in self.lacking}
            lacking = {"added_tokens_decoder": added} if added else {}
            content = {"eos_token_id": self.end_ids, **chat, **begin, **self.settings.names, **lacking}
            found[SETTINGS_FILE] = json.dumps(content, ensure_ascii=False, indent=1).encode()
        return found

    @functools.cached_property
    def lacking(self) -> tuple[str, ...]:
        """Names of tokens that the model's folder adds to the tokenizer, and that its file lacks."""
        return tuple(name for name in self.settings.added if name.strip() and self.pieces.id_of(name) is None)

    @property
    def lacking_hint(self) -> str:
        """What to do about a token that the file lacks."""
        if isinstance(self.pieces, JsonPieces):
            return "its `tokenizer.json` is of another model or version; copy all files of the tokenizer again"
        return f"copy `tokenizer.json` from the model's page too, which has the tokens that were added; {JSON_MAKER}"

    @property
    def eos_id(self) -> int:
        """The id that ends what the model learns."""
        return self.end_ids[0]

    @property
    def marks(self) -> Mapping[str, Mark]:
        """The tokens that a chat template writes, by name. No text becomes one of them in `encode`."""
        return self.pieces.marks

    @functools.cached_property
    def template_names(self) -> dict[str, str]:
        """Names of special tokens, as variables of the chat template: bos_token, eos_token and others."""
        own = {"eos_token": self.pieces.name_of(self.eos_id)}
        if self.bos_id is not None:
            own["bos_token"] = self.pieces.name_of(self.bos_id)
        return {**own, **self.settings.names}

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Ids of a text, after the begin ids unless `bos` is False, and without an end id.

        Names of special tokens are ordinary text. Raises ValueError for text that UTF-8 cannot encode (half a surrogate
        pair).
        """
        return [*(self.begin_ids if bos else ()), *self.encode_run(text)]

    def encode_run(self, text: str, *, is_inner: bool = False) -> list[int]:
        """Ids of a text without begin and end. `is_inner`: it follows a special token. Raises as `encode`."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"The text cannot be encoded: character {error.start} is half a surrogate pair "
                f"(U+{ord(text[error.start]):04X}), which UTF-8 does not have"
            ) from None
        return self.pieces.encode(text, is_inner=is_inner)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids. Control tokens give no text, and invalid bytes give U+FFFD.

        Raises ValueError for an id outside the vocabulary.
        """
        whole = [int(piece_id) for piece_id in ids]
        self.check(whole)
        if self.pieces.is_exact:
            return self.pieces.decode(whole)
        stream = IncrementalDetokenizer(self)
        return "".join([*map(stream.push, whole), stream.flush()])

    def encode_continuation(self, prompt: str | None, text: str, *, is_inner: bool = False) -> list[int]:
        """Ids of `text` after `prompt`, without begin or end id.

        Both are encoded together and the prompt's ids are removed, as in training. If a piece spans the border, or if
        there is no prompt, `text` is encoded alone, without the space that SentencePiece puts before a text.
        `is_inner`: the prompt follows a special token.
        """
        if prompt is not None:
            alone = self.encode_run(prompt, is_inner=is_inner) if prompt else []
            joint = self.encode_run(prompt + text, is_inner=is_inner)
            if joint[: len(alone)] == alone:
                return joint[len(alone) :]
        # A line feed is a byte piece in LLaMA's vocabulary, so no piece spans it.
        border = self.encode("\n", bos=False)
        joint = self.encode("\n" + text, bos=False)
        if joint[: len(border)] == border:
            return joint[len(border) :]
        return self.encode(text, bos=False)

    def check(self, ids: Sequence[int]) -> None:
        """Raise ValueError for an id outside the vocabulary."""
        for piece_id in ids:
            if not 0 <= piece_id < self.vocab_size:
                raise ValueError(
                    f"Token id {piece_id} is outside the tokenizer's vocabulary of {self.vocab_size} pieces "
                    f"(0 to {self.vocab_size - 1})"
                )

    @functools.cached_property
    def _silent_ids(self) -> frozenset[int]:
        return frozenset(mark.id for mark in self.marks.values() if mark.is_special)

    def bytes_of(self, piece_id: int, *, is_first: bool) -> bytes:
        """The bytes that a piece adds to a text, at its start or inside it.

        Control pieces and the unknown piece have none.
        """
        if (content := self.pieces.bytes_of(piece_id)) is not None:
            return content
        if piece_id in self._silent_ids:
            return b""
        return (self.decode([piece_id]) if is_first else self.pieces.text_inside(piece_id)).encode()

    def name_of(self, piece_id: int) -> str:
        """The name of a piece in the vocabulary, such as </s> or <0x0A>."""
        return self.pieces.name_of(piece_id)


def _is_written(name: str, settings: TokenizerSettings) -> bool:
    """Whether prompts or answers may need a special token, also by a variable of the template."""
    template = settings.chat_template or ""
    used = ("bos_token", "eos_token", "fake_image_token")
    names = (token for variable, token in settings.names.items() if variable in used or variable in template)
    return name in template or name in names or IN_PICTURES.fullmatch(name) is not None


class IncrementalDetokenizer:
    """Turns one stream of ids into text piece by piece. Not thread-safe.

    The texts of `push` and `flush` together equal `Tokenizer.decode` of the ids. Bytes of an unfinished character, at
    most three, are held back until it is complete or invalid.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._pieces = tokenizer, tokenizer.pieces
        self._bytes = codecs.getincrementaldecoder("utf-8")(self._pieces.byte_errors)
        # Ids that have given no text so far. SentencePiece drops a space at the start of a text, so the next piece
        # depends on these ids. After the first text, pieces are independent.
        self._silent: list[int] = []
        self._started = False

    def push(self, piece_id: int) -> str:
        """Add the next id; return the text that has become final, possibly empty.

        Raises ValueError for an id outside the vocabulary.
        """
        self._tokenizer.check((piece_id,))
        content = self._pieces.bytes_of(piece_id)
        if content is not None:
            return self._emit(self._bytes.decode(content))
        before = self._bytes.decode(b"", final=True)
        if self._started or before:
            return self._emit(before + self._pieces.text_inside(piece_id))
        text = self._pieces.decode([*self._silent, piece_id])
        self._silent.append(piece_id)
        return self._emit(text)

    def peek(self, piece_id: int) -> str:
        """What `push` would add, without adding it; the name of a piece that adds no text, such as </s>."""
        state = self._bytes.getstate()
        content = self._pieces.bytes_of(piece_id)
        text = self._bytes.decode(content or b"", final=content is None)
        self._bytes.setstate(state)
        if content is None:
            is_inside = self._started or bool(text)
            text += self._pieces.text_inside(piece_id) if is_inside else self._pieces.decode([*self._silent, piece_id])
        return text or self._tokenizer.name_of(piece_id)

    def flush(self) -> str:
        """End the stream; return the text that was held back, with U+FFFD for bytes that are not a character."""
        return self._emit(self._bytes.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if text:
            self._started = True
            self._silent.clear()
        return text
