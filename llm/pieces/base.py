"""What all kinds of tokenizer files offer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

TOKENIZER_FILES: Final = ("tokenizer.model", "tokenizer.json")  # of SentencePiece or byte ranks, and of `tokenizers`


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A token that a chat template writes and that no text of a user becomes, such as `<|im_end|>`."""

    id: int
    is_special: bool = True  # False: it has text in answers, such as `<think>`
    takes_left: bool = False  # white space before it belongs to it
    takes_right: bool = False


class Pieces(Protocol):
    """The pieces of one tokenizer file. Immutable and thread-safe."""

    file_name: str  # under which such files are found
    num_ids: int  # the highest id, and one
    begin_ids: tuple[int, ...]  # in front of a text
    bos_id: int | None  # the id that begins a text, if there is one
    end_ids: tuple[int, ...]  # those that the file itself names
    unknown_id: int | None
    byte_errors: str  # error handler of codecs for bytes that are not UTF-8
    is_exact: bool  # whether `decode` gives what a stream of the ids gives, also for bytes that are not UTF-8
    marks: Mapping[str, Mark]

    def encode(self, text: str, *, is_inner: bool = False) -> list[int]:
        """Ids of a text without begin and end. Names of marks are ordinary text. `is_inner`: it follows a mark."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of known ids. Control tokens have no text."""

    def text_inside(self, piece_id: int) -> str:
        """Text of a piece without bytes inside a text, where its leading space is kept."""

    def bytes_of(self, piece_id: int) -> bytes | None:
        """The bytes of a piece of bytes, which may be part of a character; None for other pieces."""

    def id_of(self, name: str) -> int | None:
        """The id of a piece's name; None for other texts."""

    def name_of(self, piece_id: int) -> str:
        """The name of a piece, such as </s> or <0x0A>."""
