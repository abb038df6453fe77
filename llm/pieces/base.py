"""What the kinds of tokenizer files have in common."""

from dataclasses import dataclass
from typing import Final

TOKENIZER_FILES: Final = ("tokenizer.model", "tokenizer.json")  # of SentencePiece or byte ranks, and of `tokenizers`


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A token that a chat template writes and that no text of a user becomes, such as `<|im_end|>`."""

    id: int
    is_special: bool = True  # False: it has text in answers, such as `<think>`
    takes_left: bool = False  # white space before it belongs to it
    takes_right: bool = False
