"""Tables of labelled pictures: CSV, TSV or JSON lines."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from llama_adapter.app.inputs import InputsError
from llama_adapter.app.inputs.fields import PICTURE_COLUMNS, PROMPT_COLUMNS
from llama_adapter.app.inputs.tables import read_rows
from llama_adapter.runtime.text import shown_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled:
    """One picture, its question, and the right choice."""

    picture: str  # path from the current folder
    label: int  # index of the right choice
    prompt: str | None  # None: the command's question
    line: int


def read_labelled(path: str, *, choices: Sequence[str]) -> list[Labelled]:
    """The rows of a table, without duplicates. Pictures are relative to the table's folder.

    Raises InputsError, which names the line of an invalid row, and OSError.
    """
    found: dict[tuple[str, str | None], Labelled] = {}
    for row in read_rows(path, what="table of labelled pictures", keep_bytes=True):
        if row.problem:
            _refuse(path, row.line, row.problem)
        one = _labelled(path, row.line, row.values, choices)
        earlier = found.setdefault((one.picture, one.prompt), one)
        if earlier.label != one.label:
            _refuse(path, row.line, f"line {earlier.line} has another label for the same picture and question")
    if not found:
        raise InputsError(f"Wanted labelled pictures in `{shown_name(path)}`, which has none.")
    return list(found.values())


def _labelled(path: str, line: int, row: Mapping[str, object], choices: Sequence[str]) -> Labelled:
    row = {name.lower(): value for name, value in row.items() if value not in (None, "")}
    picture, prompt = (
        next((row[name] for name in of if name in row), None) for of in (PICTURE_COLUMNS, PROMPT_COLUMNS)
    )
    label = row.get("label")
    if not isinstance(picture, str):
        _refuse(path, line, f"it has no picture in a column {', '.join(PICTURE_COLUMNS[:-1])} or {PICTURE_COLUMNS[-1]}")
    folded = [choice.strip().casefold() for choice in choices]
    if not isinstance(label, str) or label.strip().casefold() not in folded:
        reason = "it has no label" if label is None else f"its label {label!r} is none of {', '.join(choices)}"
        _refuse(path, line, reason)
    if prompt is not None and not isinstance(prompt, str):
        _refuse(path, line, "its prompt is not text")
    return Labelled(
        picture=os.path.join(os.path.dirname(path), picture),
        label=folded.index(label.strip().casefold()),
        prompt=prompt,
        line=line,
    )


def _refuse(path: str, line: int, reason: str) -> NoReturn:
    raise InputsError(f"Wanted a labelled picture in `{shown_name(path)}`, line {line}, but {reason}.")
