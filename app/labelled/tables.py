"""Reads tables of labelled pictures and texts: JSONL, CSV, TSV, and JSON lists of objects."""

import json
import os
from collections.abc import Iterator

from llama_adapter.app.inputs import InputsError
from llama_adapter.app.inputs.tables import TABLE_SUFFIXES, Row, read_rows
from llama_adapter.app.labelled.example import Examples
from llama_adapter.app.labelled.members import with_members
from llama_adapter.app.labelled.rows import Columns, row_examples, without_copies
from llama_adapter.runtime.text import shown_name

_WHAT = "table of labelled pictures"
_EVERYTHING = Columns()


def is_table_name(name: str) -> bool:
    """Whether the name of a file is that of a table."""
    return name.lower().endswith((".json", *TABLE_SUFFIXES))


def table_examples(path: str, *, columns: Columns = _EVERYTHING, split: str = "") -> Examples:
    """The examples of a table, without duplicates.

    Paths of pictures are relative to the table's folder; missing pictures are not reported. A picture may be in an
    archive: `shard.tar/000.jpg`. A JSON file has a list of objects, or one object per line. Malformed rows, and
    different answers to the same question about the same picture, are problems with their line.

    Raises InputsError if the file is unusable as a whole, and OSError.
    """
    found = Examples()
    for row in _json_rows(path) if path.lower().endswith(".json") else read_rows(path, what=_WHAT, keep_bytes=True):
        place = f"{path}, line {row.line}"
        try:
            if row.problem:
                raise ValueError(row.problem)
            root = os.path.dirname(path)
            found.examples += row_examples(
                row.values, columns=columns, place=place, line=row.line, root=root, split=split
            )
        except ValueError as error:
            found.refuse(place, str(error))
    without_copies(found, question=columns.question, name_of=lambda example: f"line {example.line}")
    with_members(found)
    return found


def load_json(path: str, *, what: str) -> object:
    """The value in a JSON file. Raises InputsError; `what` is the kind of file in its message."""
    try:
        with open(path, "rb") as file:
            return json.loads(file.read().decode("utf-8-sig"))
    except OSError as error:
        reason = f"the system says: {error.strerror}"
    except (ValueError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        reason = "it is not valid JSON"
    raise InputsError(f"Wanted to read the {what} `{shown_name(path)}`, but {reason}.", hint="copy it again")


def json_objects(path: str, *, what: str) -> Iterator[tuple[int, dict[str, object]]]:
    """The objects of a JSON list, or of lines of JSON, each with its number from 1. Raises InputsError."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = f"the system says: {error.strerror}" if isinstance(error, OSError) else "it is not UTF-8"
        raise InputsError(f"Wanted to read the {what} `{shown_name(path)}`, but {reason}.") from None
    try:
        try:
            values = json.loads(text)
        except json.JSONDecodeError:
            values = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, RecursionError):
        values = None
    values = [values] if isinstance(values, dict) else values
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise InputsError(
            f"Wanted a {what} that is a list of objects in JSON, got `{shown_name(path)}`.",
            hint='write [{"image": "a.jpg", "question": "...", "answer": "..."}, ...]',
        )
    yield from enumerate(values, start=1)


def _json_rows(path: str) -> Iterator[Row]:
    return (Row(line=number, values=values) for number, values in json_objects(path, what=_WHAT))
