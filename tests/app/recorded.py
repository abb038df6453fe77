"""Answers and their records, for tests of what is done with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llama_adapter.app.records.key import RecordKey
from llama_adapter.app.records.record import ErrorLike, Record, answer_to_record

SAMPLING = {"max_new_tokens": 16, "temperature": 0.0, "choices": ["Yes", "No"]}


@dataclass(frozen=True, kw_only=True)
class FakeError:
    code: str
    message: str


@dataclass(frozen=True, kw_only=True)
class FakeAnswer:
    picture: str = "pics/été.jpg"
    digest: str = "ab" * 32
    prompt: str = "What is it?"
    text: str = "a red\ncircle “图” \u2028"
    token_ids: Sequence[int] = (5, 6, 7)
    finish: str = "stop"
    choice: Mapping[str, float] | None = None
    details: Mapping[str, object] = field(default_factory=dict)
    unfamiliar: bool | None = None
    error: ErrorLike | None = None
    ms: Mapping[str, float] = field(default_factory=lambda: {"clip": 1.23456, "total": 9.0})


def recorded(answer: FakeAnswer | None = None, *, run: str = "run-1", model_digest: str = "model") -> Record:
    answer = answer or FakeAnswer()
    key = RecordKey(picture=answer.picture, prompt=answer.prompt, model_digest=model_digest, settings=SAMPLING)
    return answer_to_record(answer, key=key, run=run)
