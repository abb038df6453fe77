"""What comes out: pieces of text as they are ready, and answers. Plain values, no model."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerError:
    """Why a picture has no answer, or not a whole one."""

    code: str
    message: str


NOT_FINITE = AnswerError(
    code="not_finite",
    message="The model's numbers are not finite: they overflowed (try float32), or weights are damaged (try doctor).",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer to one work item; with `error`, there is none and the text is empty, or what there was until then."""

    index: int
    picture: str
    digest: str  # of the picture's bytes; empty when they could not be read
    prompt: str
    text: str
    token_ids: tuple[int, ...]
    finish: Literal["stop", "length", "choice", "error"]
    choice: dict[str, float] | None = None  # probability of each choice, they sum to 1
    error: AnswerError | None = None
    # queue (of a service), read, clip (its batch's, as the host saw it), first_token, total
    ms: dict[str, float] = field(default_factory=dict)
    prompt_tokens: int = 0
    unfamiliar: bool | None = None  # the picture is unlike those the model was trained on; None: nobody can tell
    is_reused: bool = False  # the picture was encoded already: nothing of it was read or encoded again
    tag: Any = None  # the `tag` of the question


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDelta:
    """The next piece of an answer's text."""

    index: int
    text: str


Event = TextDelta | Answer
