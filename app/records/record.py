"""Answers as they are kept: one JSON object a line. Writing files of them is in file.py; no tensors here."""

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NotRequired, Protocol, TypedDict, cast

from llama_adapter.app.records.tail import fault_in, is_torn, without_zeros
from llama_adapter.runtime.errors import LlamaAdapterError
from llama_adapter.runtime.text import UNSAFE_ON_TERMINALS

PART_NAME: Final = re.compile(r"part-(\d{5,})\.jsonl")


class RecordFileError(LlamaAdapterError):
    """A file of answers, or the manifest beside it, is not what its name promises."""


class ErrorLike(Protocol):
    """Why there is no answer."""

    @property
    def code(self) -> str: ...
    @property
    def message(self) -> str: ...


class AnswerLike(Protocol):
    """What a record needs to know of an answer."""

    @property
    def picture(self) -> str: ...  # its label
    @property
    def digest(self) -> str: ...  # of the picture; empty when its bytes could not be read
    @property
    def prompt(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish(self) -> str: ...
    @property
    def choice(self) -> Mapping[str, float] | None: ...
    @property
    def details(self) -> Mapping[str, Any]: ...
    @property
    def unfamiliar(self) -> bool | None: ...
    @property
    def error(self) -> ErrorLike | None: ...
    @property
    def ms(self) -> Mapping[str, float]: ...


class ErrorRecord(TypedDict):
    """The `error` of a record."""

    code: str
    message: str


class Record(TypedDict):
    """One line of a file of answers. Keys that are not required may be missing."""

    id: str
    picture: str  # its name; bytes of it that are not UTF-8 are surrogates, as `os.fsdecode` gives them
    # True where the name has a backslash. Without this, it may be from an earlier version, which wrote escapes there.
    exact_name: NotRequired[bool]
    prompt: str
    text: str
    finish: str  # stop, length, choice or error
    choice: dict[str, float | None] | None  # probabilities; only where choices were asked for
    tokens: int
    supersedes: NotRequired[list[str]]  # what failed in an earlier run under these names, such as an empty folder
    unfamiliar: NotRequired[bool]  # the picture is unlike those the model was trained on; absent where nobody can tell
    error: ErrorRecord | None
    ms: dict[str, float | None]
    run: str


def record_id(picture_digest: str, *, prompt: object, model_digest: str, sampling: Mapping[str, Any]) -> str:
    """Digest of everything an answer depends on: the same id means the work is already done.

    `prompt` and `sampling` are plain JSON values; the order of the keys of `sampling` does not matter. 32 hex digits.
    """
    parts = [picture_digest, prompt, model_digest, dict(sampling)]
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def picture_key(digest: str, picture: str) -> str:
    """What stands for a picture in an id: the digest of its bytes, or its name where they could not be had."""
    return digest or f"name:{picture}"


def answer_to_record(answer: AnswerLike, *, model_digest: str, sampling: Mapping[str, Any], run: str) -> Record:
    """The record of one answer. A picture without bytes is identified by its name instead of its digest.

    Probabilities keep six significant digits: of one of 3e-7 too, something is left.
    """
    key = picture_key(answer.digest, answer.picture)
    error = answer.error
    record = Record(
        id=record_id(key, prompt=answer.prompt, model_digest=model_digest, sampling=sampling),
        picture=answer.picture,
        prompt=answer.prompt,
        text=answer.text,
        finish=answer.finish,
        choice=None
        if answer.choice is None
        else {name: _or_null(float(f"{p:.6g}")) for name, p in answer.choice.items()},
        tokens=len(answer.token_ids),
        error=None if error is None else ErrorRecord(code=error.code, message=error.message),
        ms={name: _or_null(round(value, 3)) for name, value in answer.ms.items()},
        run=run,
    )
    if answer.unfamiliar is not None:
        record["unfamiliar"] = answer.unfamiliar
    if "\\" in answer.picture:
        record["exact_name"] = True
    return cast(Record, {**record, **{name: value for name, value in answer.details.items() if name not in record}})


def _or_null(number: float) -> float | None:
    """JSON has no NaN and no infinity: they become null, so that one odd value does not cost a record."""
    return number if math.isfinite(number) else None


def record_to_line(record: Record) -> str:
    """The record as one line of JSON, without the line feed; see `json_line`."""
    return json_line(record)


def json_line(value: Mapping[str, object]) -> str:
    """An object as one line of JSON: text stays readable, not escaped to ASCII.

    What a terminal would act on is escaped, and what some readers of lines take for their end. So are halves of
    surrogate pairs, which have no UTF-8 form. All of them read back as they were.
    """
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return UNSAFE_ON_TERMINALS.sub(lambda unsafe: f"\\u{ord(unsafe[0]):04x}", line)


def may_be_escaped(record: Record) -> bool:
    """Whether the picture's name may be a `picture_names.escaped_name`, as earlier versions wrote it."""
    return "\\" in record["picture"] and not record.get("exact_name", False)


def is_part(path: str | os.PathLike[str]) -> bool:
    """Whether a file is named as one of a folder of record files is."""
    return PART_NAME.fullmatch(os.path.basename(os.fspath(path))) is not None


def read_records(path: str | os.PathLike[str]) -> Iterator[Record]:
    """The records of a file in order, superseded ones among them; empty lines and a torn last one are passed over.

    Raises `RecordFileError` naming the first line that is no record, also where a last line without a line feed is
    more than a torn record, and OSError when the file cannot be read.
    """
    return (record for _, record in read_record_lines(path))


def read_record_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, Record]]:
    """As `read_records`, each with the offset of its line in bytes."""
    offset = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            is_whole = line.endswith(b"\n")
            record = parse_record(line if is_whole else without_zeros(line))
            if record is not None:
                yield offset, record
            elif not line.isspace() and (is_whole or not is_torn(line)):  # editors and joined files leave empty lines
                raise no_records(path, where=f"line {number}", line=line)
            offset += len(line)


def superseded_names(record: Record) -> list[str]:
    """Names whose failures in earlier runs a record supersedes; a file may come from anywhere."""
    names = record.get("supersedes")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def parse_record(line: bytes) -> Record | None:
    """The record of one line, None for anything else: also where a value is not what its name promises."""
    try:
        value = json.loads(line.decode("utf-8-sig", "surrogatepass"))  # json would take UTF-16 as well
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not value.keys() >= Record.__required_keys__:
        return None
    return cast(Record, value) if _is_sound(cast(Record, value)) else None


def _is_sound(record: Record) -> bool:
    """Whether the values are what their names promise: a file may come from anywhere."""
    texts = (record[name] for name in ("id", "picture", "prompt", "text", "finish", "run"))
    error, choice = record["error"], record["choice"]
    return (
        _are(str, *texts)
        and type(record["tokens"]) is int
        and 0 <= record["tokens"] < 2**63
        and isinstance(record.get("unfamiliar"), bool | None)
        and isinstance(record.get("exact_name"), bool | None)
        and (error is None or (isinstance(error, dict) and _are(str, error.get("code"), error.get("message"))))
        and (choice is None or (isinstance(choice, dict) and len(choice) > 1 and _are_numbers(choice.values())))
        and isinstance(record["ms"], dict)
        and _are_numbers(record["ms"].values())
    )


def _are(kind: type, *values: object) -> bool:
    return all(isinstance(value, kind) for value in values)


def _are_numbers(values: Iterable[object]) -> bool:
    """Finite ones, or null in their place."""
    return all(
        value is None or (type(value) in (int, float) and abs(cast(float, value)) <= sys.float_info.max)
        for value in values
    )


def no_records(path: str | os.PathLike[str], *, where: str, line: bytes = b"") -> RecordFileError:
    """The error for a file that holds something else; `line` is what stands there, where that says more."""
    fault, advice = fault_in(line)
    return RecordFileError(
        f"Wanted a file of answers (JSON lines) at `{os.fspath(path)}`, but {where} {fault}; {advice}."
    )
