"""LLaMA's SentencePiece tokenizer: text to ids and back, as a whole or as a stream."""

import codecs
import os
from collections.abc import Sequence
from pathlib import Path

import sentencepiece

from llama_adapter.runtime.errors import CheckpointError

_MAX_BYTES = 64 << 20  # the largest tokenizers in use have 5 MB


def _replace_byte(error: UnicodeError) -> tuple[str, int]:
    """As in SentencePiece, every byte that is not part of a character becomes U+FFFD."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd", error.start + 1


codecs.register_error("replace-byte", _replace_byte)


class Tokenizer:
    """A loaded SentencePiece model. Immutable and thread-safe.

    `data` is the content of its file, `vocab_size` is the number of pieces, `bos_id` and `eos_id` begin and end a text.
    """

    def __init__(self, processor: sentencepiece.SentencePieceProcessor, data: bytes) -> None:
        """Wrap a processor and the bytes it was loaded from; use `load` or `from_bytes`."""
        self._processor = processor
        self.data = data
        self.vocab_size: int = processor.get_piece_size()
        self.bos_id: int = processor.bos_id()
        self.eos_id: int = processor.eos_id()
        self._unk_id: int = processor.unk_id()
        self._unk_length = len(processor.decode([self._unk_id]))
        self._byte_of_id: dict[int, int] = {
            piece_id: int(processor.id_to_piece(piece_id)[3:5], 16)
            for piece_id in range(self.vocab_size)
            if processor.is_byte(piece_id)
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Read a `tokenizer.model` file.

        Raises CheckpointError if the file is missing, unreadable or not a SentencePiece model.
        """
        place = Path(path)
        try:
            if place.exists() and not place.is_file():  # reading a pipe or a device may never end
                raise CheckpointError(f"The tokenizer `{place}` is not a regular file")
            if place.exists() and place.stat().st_size > _MAX_BYTES:
                raise CheckpointError(f"The tokenizer `{place}` has {place.stat().st_size:,} bytes: not a tokenizer")
            data = place.read_bytes()
        except FileNotFoundError:
            raise CheckpointError(
                f"No tokenizer at `{place}`",
                hint="LLaMA comes with a file `tokenizer.model`; put it into the model's folder or beside it",
            ) from None
        except OSError as error:
            raise CheckpointError(f"Cannot read the tokenizer `{place}`: {error.strerror}") from None
        return cls.from_bytes(data, name=str(place))

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str = "tokenizer.model") -> "Tokenizer":
        """Tokenizer from the bytes of a `tokenizer.model`. `name` is used in messages.

        Raises CheckpointError if the bytes are not a SentencePiece model with begin and end pieces.
        """
        reason = _why_not_sentencepiece(data)
        processor = None
        if reason is None:
            try:
                processor = sentencepiece.SentencePieceProcessor(model_proto=data)
            except (RuntimeError, ValueError, OSError):
                reason = f"its {len(data):,} bytes are not a SentencePiece model"
        if processor is None:
            raise CheckpointError(
                f"`{name}` is not a LLaMA tokenizer: {reason}",
                hint="the file is damaged, truncated or another model's; copy `tokenizer.model` again "
                "(LLaMA-7B's has 499,723 bytes)",
            )
        if processor.bos_id() < 0 or processor.eos_id() < 0:
            raise CheckpointError(
                f"`{name}` is a SentencePiece model without begin or end piece, so not LLaMA's tokenizer",
                hint="use the `tokenizer.model` that came with the LLaMA weights",
            )
        return cls(processor, data)

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Ids of a text, after the begin id unless `bos` is False, and without an end id.

        Raises ValueError for text that UTF-8 cannot encode (half a surrogate pair).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"The text cannot be encoded: character {error.start} is half a surrogate pair "
                f"(U+{ord(text[error.start]):04X}), which UTF-8 does not have"
            ) from None
        ids: list[int] = self._processor.encode(text)
        return [self.bos_id, *ids] if bos else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids. Control pieces give no text, the unknown piece gives " \u2047 ", and invalid bytes give U+FFFD.

        Raises ValueError for an id outside the vocabulary.
        """
        whole = [int(piece_id) for piece_id in ids]
        self.check(whole)
        text: str = self._processor.decode(whole) if whole else ""
        return text

    def decode_inner(self, piece_id: int) -> str:
        """Text of one piece, not a byte piece, inside a text, where SentencePiece keeps its leading space."""
        # The unknown piece stands for the text before. Every SentencePiece model has one.
        return self.decode([self._unk_id, piece_id])[self._unk_length :]

    def encode_continuation(self, prompt: str | None, text: str) -> list[int]:
        """Ids of `text` after `prompt`, without begin or end id.

        Both are encoded together and the prompt's ids are removed, as in training. If a piece spans the border, or if
        there is no prompt, `text` is encoded alone, without the space that SentencePiece puts before a text.
        """
        if prompt is not None:
            alone = self.encode(prompt, bos=False)
            joint = self.encode(prompt + text, bos=False)
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

    def byte_of(self, piece_id: int) -> int | None:
        """The byte of a byte piece; None for other pieces."""
        return self._byte_of_id.get(piece_id)

    def bytes_of(self, piece_id: int, *, is_first: bool) -> bytes:
        """The bytes that a piece adds to a text, at its start or inside it.

        Control pieces and the unknown piece have none.
        """
        kinds = self._processor
        if kinds.is_control(piece_id) or kinds.is_unknown(piece_id) or kinds.is_unused(piece_id):
            return b""
        if (byte := self.byte_of(piece_id)) is not None:
            return bytes([byte])
        return (self.decode([piece_id]) if is_first else self.decode_inner(piece_id)).encode()

    def name_of(self, piece_id: int) -> str:
        """The name of a piece in the vocabulary, such as </s> or <0x0A>."""
        name: str = self._processor.id_to_piece(piece_id)
        return name


class IncrementalDetokenizer:
    """Turns one stream of ids into text piece by piece. Not thread-safe.

    The texts of `push` and `flush` together equal `Tokenizer.decode` of the ids. Bytes of an unfinished character are
    held back until it is complete or invalid.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace-byte")
        # Ids that have given no text so far. SentencePiece drops a space at the start of a text, so the next piece
        # depends on these ids. After the first text, pieces are independent.
        self._silent: list[int] = []
        self._started = False

    def push(self, piece_id: int) -> str:
        """Add the next id; return the text that has become final, possibly empty.

        Raises ValueError for an id outside the vocabulary.
        """
        byte = self._tokenizer.byte_of(piece_id)
        if byte is not None:
            return self._emit(self._bytes.decode(bytes([byte])))
        before = self._bytes.decode(b"", final=True)
        if before:
            self._started = True
        return self._emit(before + self._piece_text(piece_id))

    def peek(self, piece_id: int) -> str:
        """What `push` would add, without adding it; the name of a piece that adds no text, such as </s>."""
        state = self._bytes.getstate()
        byte = self._tokenizer.byte_of(piece_id)
        text = self._bytes.decode(b"" if byte is None else bytes([byte]), final=byte is None)
        self._bytes.setstate(state)
        if byte is None:
            is_inside = self._started or bool(text)
            text += (
                self._tokenizer.decode_inner(piece_id)
                if is_inside
                else self._tokenizer.decode([*self._silent, piece_id])
            )
        return text or self._tokenizer.name_of(piece_id)

    def flush(self) -> str:
        """End the stream; return the text that was held back, with U+FFFD for bytes that are not a character."""
        return self._emit(self._bytes.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if text:
            self._started = True
            self._silent.clear()
        return text

    def _piece_text(self, piece_id: int) -> str:
        if not self._started:
            text = self._tokenizer.decode([*self._silent, piece_id])
            self._silent.append(piece_id)
            return text
        return self._tokenizer.decode_inner(piece_id)


def _why_not_sentencepiece(data: bytes) -> str | None:
    """The reason if `data` is a file that is often passed instead of a SentencePiece model; else None."""
    if not data:
        return "the file is empty"
    if data.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer; the file itself was not downloaded"
    if data.lstrip()[:1] == b"{":
        return "it is JSON (perhaps `tokenizer.json`), not SentencePiece's binary form"
    if data.startswith(b"IQ== 0"):
        return "it is LLaMA 3's table of byte ranks, not SentencePiece's binary form"
    return None
