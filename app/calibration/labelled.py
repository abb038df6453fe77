"""Tables of labelled pictures: CSV, TSV or JSON lines."""

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from llama_adapter.runtime.errors import UsageError

PICTURE_COLUMNS: Final = ("picture", "image", "file_name", "filename", "path")
PROMPT_COLUMNS: Final = ("prompt", "question", "instruction")
_DELIMITERS: Final = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled:
    """One picture, its question, and the right choice."""

    picture: str  # path from the current folder
    label: int  # index of the right choice
    prompt: str | None  # None: the command's question
    line: int


def read_labelled(path: str, *, choices: Sequence[str]) -> list[Labelled]:
    """The rows of a table, without duplicates. Pictures are relative to the table's folder.

    Raises UsageError, which names the line, for invalid rows, and OSError.
    """
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in (*_DELIMITERS, ".jsonl"):
        raise UsageError(
            f"Wanted labelled pictures in a .csv, .tsv or .jsonl file, got `{path}`",
            hint="a table with the columns picture and label",
        )
    with open(path, "rb") as file:
        # File names are bytes: those that are not UTF-8 are kept as surrogates.
        text = file.read().decode("utf-8-sig", errors="surrogateescape")
    rows = _json_rows(path, text) if suffix == ".jsonl" else _table_rows(path, text, delimiter=_DELIMITERS[suffix])
    found: dict[tuple[str, str | None], Labelled] = {}
    for line, row in rows:
        one = _labelled(path, line, row, choices)
        earlier = found.setdefault((one.picture, one.prompt), one)
        if earlier.label != one.label:
            _refuse(path, line, f"another label than on line {earlier.line} for the same picture and question")
    if not found:
        raise UsageError(f"Wanted labelled pictures in `{path}`, got none")
    return list(found.values())


def _labelled(path: str, line: int, row: Mapping[str, Any], choices: Sequence[str]) -> Labelled:
    picture = _first(row, PICTURE_COLUMNS)
    label = row.get("label")
    if not isinstance(picture, str) or not picture:
        _refuse(path, line, f"no picture: wanted a column {', '.join(PICTURE_COLUMNS[:-1])} or {PICTURE_COLUMNS[-1]}")
    folded = [choice.strip().casefold() for choice in choices]
    if not isinstance(label, str) or label.strip().casefold() not in folded:
        _refuse(path, line, f"the label {label!r}, which is none of the choices {', '.join(choices)}")
    prompt = _first(row, PROMPT_COLUMNS)
    if prompt is not None and not isinstance(prompt, str):
        _refuse(path, line, f"a prompt that is no text: {prompt!r}")
    return Labelled(
        picture=os.path.join(os.path.dirname(path), picture),
        label=folded.index(label.strip().casefold()),
        prompt=prompt or None,
        line=line,
    )


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) not in (None, "")), None)


def _table_rows(path: str, text: str, *, delimiter: str) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    head: list[str] | None = None
    line = 1
    try:
        for cells in reader:
            if head is None:
                head = [cell.strip().lower() for cell in cells]
                if "label" not in head or not set(head) & set(PICTURE_COLUMNS):
                    named = f"picture (or {', '.join(PICTURE_COLUMNS[1:])}) and label"
                    _refuse(path, line, f"the columns {', '.join(head)}; name them {named}")
            elif cells:
                if len(cells) != len(head):
                    _refuse(path, line, f"{len(cells)} cells where the head has {len(head)}")
                yield line, dict(zip(head, cells, strict=True))
            line = reader.line_num + 1
    except csv.Error as error:
        _refuse(path, line, f"no CSV: {error}")


def _json_rows(path: str, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            _refuse(path, line, "no JSON object")
        yield line, row


def _refuse(path: str, line: int, got: str) -> NoReturn:
    raise UsageError(f"Wanted a labelled picture on line {line} of `{path}`, got {got}")
