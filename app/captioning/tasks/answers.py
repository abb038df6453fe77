"""Answers and the pieces of text before them, as plain values."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, NamedTuple

from llama_adapter.app.pictures.answer_error import AnswerError

NOT_FINITE = AnswerError(
    code="not_finite",
    message="The model's output is not finite: it overflowed (try float32), or weights are damaged (try doctor).",
)

TOO_COMPLEX = AnswerError(
    code="too_complex", message="The JSON schema or regular expression became too complex to follow: simplify it."
)
FAILURES: Mapping[str | None, AnswerError] = {"not_finite": NOT_FINITE, "too_complex": TOO_COMPLEX}  # by `Finish`


class TokenLogprob(NamedTuple):
    """A generated token: what it adds to the text, and its log-probability before temperature, top-k and top-p."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()  # the likeliest tokens in its place, if requested


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Answer:
    """The answer to one question about one picture. With `error`, the text is empty or incomplete."""

    index: int  # index of the question
    picture: str  # label of the picture
    # SHA-256 of the picture's bytes, hexadecimal; "" if they could not be read. Without a picture: the text prefix.
    digest: str
    prompt: str
    text: str
    token_ids: tuple[int, ...]
    finish: Literal["stop", "length", "choice", "error"]
    choice: dict[str, float] | None = None  # probability of each choice; the sum is 1
    details: Mapping[str, Any] = field(default_factory=dict)  # additional fields of the record: JSON values by name
    error: AnswerError | None = None
    # Milliseconds. queue: time until a service admitted the request; clip: time of the encoder for the whole batch.
    ms: dict[str, float] = field(default_factory=dict)  # queue, read, clip, first_token, total
    prompt_tokens: int = 0
    unfamiliar: bool | None = None  # whether the picture is out of distribution; None: the model cannot tell
    is_reused: bool = False  # the encoded picture came from the cache
    tag: Any = None  # the `tag` of the question
    logprobs: tuple[TokenLogprob, ...] = ()  # of the generated tokens, if requested

    @classmethod
    def failed(cls, error: AnswerError, **fields: Any) -> "Answer":
        """The answer, without text, to a question that failed before a model had it; `fields` are further ones."""
        empty: dict[str, Any] = {"index": 0, "digest": "", "prompt": "", "text": "", "token_ids": ()}
        return cls(finish="error", error=error, **empty | fields)

    def __repr__(self) -> str:
        optional = [name for name in ("choice", "error") if getattr(self, name) is not None]
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("picture", "text", "finish", *optional))
        return f"Answer({shown})"


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDelta:
    """The next piece of an answer's text."""

    index: int
    text: str
    token_ids: tuple[int, ...] = field(default=(), repr=False, compare=False)  # new since the last piece
    logprobs: tuple[TokenLogprob, ...] = field(default=(), repr=False, compare=False)  # of these tokens, if requested


Event = TextDelta | Answer

_COLUMNS = ("picture", "prompt", "text", "finish", "unfamiliar", "tokens", "ms", "error", "reason")


def answers_to_pandas(answers: Iterable[Answer]) -> Any:
    """A `pandas.DataFrame` with a row for each answer, and a column `probability of ...` for each choice.

    The columns are named as in the CSV of `export-records`. Raises ImportError without pandas.
    """
    rows = [
        {
            **{name: getattr(answer, name) for name in ("picture", "prompt", "text", "finish", "unfamiliar")},
            "tokens": len(answer.token_ids),
            "ms": answer.ms.get("total"),
            "error": answer.error and answer.error.code,
            "reason": answer.error and answer.error.message,
            **{f"probability of {text}": probability for text, probability in (answer.choice or {}).items()},
        }
        for answer in answers
    ]
    names = dict.fromkeys([*_COLUMNS, *(name for row in rows for name in row)])
    return import_module("pandas").DataFrame(rows, columns=list(names))
