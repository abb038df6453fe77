"""Outcomes for the tests of scores."""

from typing import Any

from llama_adapter.app.learning.scores.outcome import Outcome


def outcome(answer: str, *references: str, **fields: Any) -> Outcome:
    """An answer with its right answers; without other `fields`, about no picture, to no question."""
    return Outcome(**{"picture": "", "question": "", **fields}, answer=answer, references=references)
