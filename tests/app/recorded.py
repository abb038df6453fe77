"""Answer records, for tests of code that uses them."""

from typing import Any

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.jobs.records.key import RecordKey
from llama_adapter.app.jobs.records.record import Record, answer_to_record
from llama_adapter.app.pictures.answer_error import AnswerError

SAMPLING = {"max_new_tokens": 16, "temperature": 0.0, "choices": ["Yes", "No"]}


def answered(**changes: Any) -> Answer:
    """An answer with these fields."""
    usual: dict[str, Any] = {
        "index": 0,
        "picture": "pics/été.jpg",
        "digest": "ab" * 32,
        "prompt": "What is it?",
        "text": "a red\ncircle “图” \u2028",
        "token_ids": (5, 6, 7),
        "finish": "stop",
        "ms": {"clip": 1.23456, "total": 9.0},
    }
    return Answer(**{**usual, **changes})


def recorded(*, id: str | None = None, run: str = "run-1", model_digest: str = "model", **changes: Any) -> Record:
    """The record of an answer with these fields."""
    answer = answered(**changes)
    key = RecordKey(picture=answer.picture, prompt=answer.prompt, model_digest=model_digest, settings=SAMPLING)
    record = answer_to_record(answer, key=key, run=run)
    return record if id is None else {**record, "id": id}


def failed(code: str = "truncated", message: str = "It is cut off.", **changes: Any) -> Record:
    """The record of a failure."""
    error = AnswerError(code=code, message=message)
    return recorded(**{"finish": "error", "text": "", "digest": "", "error": error, "ms": {}, **changes})
