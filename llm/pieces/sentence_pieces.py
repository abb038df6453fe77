"""SentencePiece models: `tokenizer.model` of LLaMA 1 and 2, Mistral, TinyLlama and others."""

import codecs
from collections.abc import Mapping, Sequence

import sentencepiece

from llama_adapter.llm.pieces.base import TOKENIZER_FILES, Mark
from llama_adapter.runtime.errors import CheckpointError


def _replace_byte(error: UnicodeError) -> tuple[str, int]:
    """As in SentencePiece, every byte that is not part of a character becomes U+FFFD."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd", error.start + 1


codecs.register_error("replace-byte", _replace_byte)


class SentencePieces:
    """The pieces of a SentencePiece model. Immutable and thread-safe, as those of the other kinds of files."""

    file_name = TOKENIZER_FILES[0]  # under which such files are found
    byte_errors = "replace-byte"  # error handler of codecs for bytes that are not UTF-8
    is_exact = True  # whether `decode` gives what a stream of the ids gives, also for bytes that are not UTF-8

    def __init__(self, data: bytes, *, name: str) -> None:
        """Read a model. `name` is used in messages.

        Raises CheckpointError if the bytes are not a SentencePiece model with begin, end and unknown pieces.
        """
        processor, reason = None, "the file is empty"
        if data.startswith(b"version https://git-lfs"):
            reason = "it is a Git LFS pointer; the file itself was not downloaded"
        elif data:
            try:
                processor = sentencepiece.SentencePieceProcessor(model_proto=data)
                pieces = processor.id_to_piece(list(range(processor.get_piece_size())))
            except (RuntimeError, ValueError, OSError):
                processor, reason = None, f"its {len(data):,} bytes are not a SentencePiece model"
        if processor is None:
            raise CheckpointError(
                f"`{name}` is not a LLaMA tokenizer: {reason}",
                hint="the file is damaged, truncated or another model's; copy `tokenizer.model` again "
                "(LLaMA-7B's has 499,723 bytes)",
            )
        if min(processor.bos_id(), processor.eos_id(), processor.unk_id()) < 0:
            raise CheckpointError(
                f"`{name}` is a SentencePiece model without begin, end or unknown piece, so not LLaMA's tokenizer",
                hint="use the `tokenizer.model` that came with the LLaMA weights",
            )
        self._processor = processor
        self.num_ids: int = processor.get_piece_size()  # the highest id, and one
        self.bos_id: int | None = processor.bos_id()  # the id that begins a text, if there is one
        self.begin_ids: tuple[int, ...] = (processor.bos_id(),)  # in front of a text
        self.end_ids: tuple[int, ...] = (processor.eos_id(),)  # those that the file itself names
        self.unknown_id: int | None = processor.unk_id()
        self._unknown_length = len(processor.decode([self.unknown_id]))
        self._byte_of_id: dict[int, bytes] = {
            piece_id: bytes.fromhex(piece[3:5]) for piece_id, piece in enumerate(pieces) if processor.is_byte(piece_id)
        }
        self.marks: Mapping[str, Mark] = {
            piece: Mark(id=piece_id)
            for piece_id, piece in enumerate(pieces)
            if processor.is_control(piece_id) or processor.is_unknown(piece_id)
        }

    def encode(self, text: str, *, is_inner: bool = False) -> list[int]:
        """Ids of a text without begin and end. Names of marks are ordinary text. `is_inner`: it follows a mark.

        Every text gets the model's leading space, also behind a mark, as in LLaMA's chats.
        """
        ids: list[int] = self._processor.encode(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of known ids. Control tokens have none, the unknown piece gives " \u2047 ", invalid bytes U+FFFD."""
        text: str = self._processor.decode(list(ids)) if ids else ""
        return text

    def text_inside(self, piece_id: int) -> str:
        """Text of a piece without bytes inside a text, where its leading space is kept."""
        # The unknown piece stands for the text before. Every SentencePiece model has one.
        assert self.unknown_id is not None
        return self.decode([self.unknown_id, piece_id])[self._unknown_length :]

    def bytes_of(self, piece_id: int) -> bytes | None:
        """The bytes of a piece of bytes, which may be part of a character; None for other pieces."""
        return self._byte_of_id.get(piece_id)

    def id_of(self, name: str) -> int | None:
        """The id of a piece's name; None for other texts."""
        found: int = self._processor.piece_to_id(name)
        return found if self.name_of(found) == name else None

    def name_of(self, piece_id: int) -> str:
        """The name of a piece, such as </s> or <0x0A>."""
        name: str = self._processor.id_to_piece(piece_id)
        return name
