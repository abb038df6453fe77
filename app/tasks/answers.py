"""Answers and the pieces of text before them, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerError:
    """Why a question has no complete answer."""

    code: str
    message: str


NOT_FINITE = AnswerError(
    code="not_finite",
    message="The model's output is not finite: it overflowed (try float32), or weights are damaged (try doctor).",
)


class TokenLogprob(NamedTuple):
    """A generated token: what it adds to the text, and its log-probability before temperature, top-k and top-p."""

    text: str
    logprob: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer to one question about one picture. With `error`, the text is empty or incomplete."""

    index: int  # of the question
    picture: str  # label
    digest: str  # SHA-256 of the picture's bytes, hexadecimal; empty: they could not be read
    prompt: str
    text: str
    token_ids: tuple[int, ...]
    finish: Literal["stop", "length", "choice", "error"]
    choice: dict[str, float] | None = None  # probability of each choice; they sum to 1
    details: Mapping[str, Any] = field(default_factory=dict)  # further fields of the record, JSON values by name
    error: AnswerError | None = None
    # Milliseconds. queue: until a service admitted it; clip: of the encoder, for the whole batch.
    ms: dict[str, float] = field(default_factory=dict)  # queue, read, clip, first_token, total
    prompt_tokens: int = 0
    unfamiliar: bool | None = None  # whether the picture is out of distribution; None: the model cannot tell
    is_reused: bool = False  # the encoded picture came from the cache
    tag: Any = None  # the `tag` of the question
    logprobs: tuple[TokenLogprob, ...] = ()  # of the generated tokens, if they were asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDelta:
    """The next piece of an answer's text."""

    index: int
    text: str


Event = TextDelta | Answer
