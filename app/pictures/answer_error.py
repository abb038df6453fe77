"""The error of a single picture or question."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerError:
    """The reason why a question has no complete answer, such as a picture that cannot be read."""

    code: str
    message: str
