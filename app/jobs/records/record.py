"""The format of records: each answer is a JSON object on one line. `file.py` writes files of records."""

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NotRequired, TypedDict, cast

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.jobs.records.key import RecordKey
from llama_adapter.runtime.record_lines import FIELDS, PART_NAME, parse_object, read_lines
from llama_adapter.runtime.text import UNSAFE_ON_TERMINALS


class ErrorRecord(TypedDict):
    """The `error` of a record."""

    code: str
    message: str


class Record(TypedDict):
    """One line of a file of records."""

    id: str
    picture: str  # the picture's name; bytes that are not UTF-8 are surrogates, as in `os.fsdecode`
    prompt: str
    text: str
    finish: str  # stop, length, choice or error
    choice: dict[str, float | None] | None  # probability of each choice; only for questions with choices
    tokens: int
    supersedes: NotRequired[list[str]]  # names that failed in an earlier run, such as an empty folder
    moved_from: NotRequired[str]  # the former name of the picture; all but `run` is as in the record of that name
    number: NotRequired[int]  # of a further answer to the same question, from 1
    logprobs: NotRequired[list[dict[str, Any]]]  # of the tokens, if asked for: as in the HTTP API
    unfamiliar: NotRequired[bool]  # the picture is unlike the training data; absent if the model cannot tell
    error: ErrorRecord | None
    ms: dict[str, float | None]
    run: str


def answer_to_record(answer: Answer, *, key: RecordKey, run: str, supersedes: Sequence[str] = ()) -> Record:
    """The record of one answer. Probabilities are rounded to six significant digits."""
    error = answer.error
    record = Record(
        id=key.id(answer.digest),
        picture=key.picture,
        prompt=key.prompt,
        text=answer.text,
        finish=answer.finish,
        choice=recorded_choice(answer),
        tokens=len(answer.token_ids),
        error=None if error is None else ErrorRecord(code=error.code, message=error.message),
        ms={name: _or_null(round(value, 3)) for name, value in answer.ms.items()},
        run=run,
    )
    if answer.unfamiliar is not None:
        record["unfamiliar"] = answer.unfamiliar
    if "number" in key.settings:
        record["number"] = key.settings["number"]
    if answer.logprobs:
        record["logprobs"] = [
            {**_token(one.text, one.logprob), "top_logprobs": [_token(*other) for other in one.top]}
            for one in answer.logprobs
        ]
    if supersedes:
        record["supersedes"] = list(supersedes)
    own = {name: value for name, value in answer.details.items() if name not in record}
    return cast(Record, {**record, **own})


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _or_null(float(f"{logprob:.6g}"))}


def moved_record(record: Record, *, picture: str) -> Record:
    """The record under the picture's present name."""
    own = {name: value for name, value in record.items() if name != "supersedes"}
    return cast(Record, {**own, "picture": picture, "moved_from": record["picture"]})


def recorded_choice(answer: Answer) -> dict[str, float | None] | None:
    """The probabilities of an answer, rounded as in records."""
    if answer.choice is None:
        return None
    return {name: _or_null(float(f"{probability:.6g}")) for name, probability in answer.choice.items()}


def _or_null(number: float) -> float | None:
    """The number, or None for NaN and infinity, which JSON lacks: such a value must not make the record invalid."""
    return number if math.isfinite(number) else None


def json_line(value: Mapping[str, object]) -> str:
    """A record or another object as one line of JSON, without the line feed. Text is not escaped to ASCII.

    Control characters, line separators and lone surrogates are escaped, because they are unsafe on terminals, or end a
    line for some readers. Parsing gives all of them back unchanged.
    """
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return UNSAFE_ON_TERMINALS.sub(lambda unsafe: f"\\u{ord(unsafe[0]):04x}", line)


def is_part(path: str | os.PathLike[str]) -> bool:
    """Whether a file has the name of a part in a folder of records."""
    return PART_NAME.fullmatch(os.path.basename(os.fspath(path))) is not None


def read_records(path: str | os.PathLike[str]) -> Iterator[Record]:
    """The records of a file in order, including superseded ones; empty lines and a torn last line are skipped.

    Raises `RecordFileError`, which names the first line that is not a record, and OSError if the file cannot be read.
    """
    return (record for _, record in read_lines(path, parse_record))


def superseded_names(record: Record) -> list[str]:
    """The names whose failures in earlier runs a record supersedes. Ignores invalid content."""
    names = record.get("supersedes")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def parse_record(line: bytes) -> Record | None:
    """The record in a line; None for anything else, also if a value has the wrong type: files are not trusted."""
    value = parse_object(line)
    return cast(Record, value) if value is not None and _is_sound(value) else None


def _is_sound(record: dict[str, Any]) -> bool:
    if not all(type(record.get(name, ...)) in kinds for name, kinds in FIELDS.items()):
        return False
    error, choice = record["error"], record["choice"]
    return (
        0 <= record["tokens"] < 2**63
        and isinstance(record.get("unfamiliar"), bool | None)
        and isinstance(record.get("moved_from"), str | None)
        and (error is None or all(isinstance(error.get(name), str) for name in ("code", "message")))
        and (choice is None or (len(choice) > 1 and _are_numbers(choice.values())))
        and _are_numbers(record["ms"].values())
    )


def _are_numbers(values: Iterable[object]) -> bool:
    """Whether all values are finite numbers or null."""
    return all(
        value is None or (type(value) in (int, float) and abs(cast(float, value)) <= sys.float_info.max)
        for value in values
    )
