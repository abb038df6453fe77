"""Manifests: tables with a picture in each row, and optionally its own question and columns for templates."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby, islice

from llama_adapter.app.inputs.addresses import ADDRESS
from llama_adapter.app.inputs.fields import (
    PICTURE_COLUMNS,
    PROMPT_COLUMNS,
    as_columns,
    first_column,
    question_columns,
    question_fields,
)
from llama_adapter.app.inputs.items import InputsError, PictureInput
from llama_adapter.app.inputs.lines import can_read_again, check_lines
from llama_adapter.app.inputs.tables import check_suffix, read_rows
from llama_adapter.runtime.text import shown_name

_MAX_QUESTIONS = 1024  # per item; a picture with more questions gives several items and is read again


def manifest_inputs(path: str) -> Iterator[PictureInput]:
    """The pictures of a manifest, in the order of its lines.

    The picture's path, relative to the manifest's folder, is in the first existing column of picture, image, file_name,
    filename and path (so Hugging Face's metadata.jsonl is a manifest). The columns prompt (or question, or
    instruction), input and choices give the picture's own question. All other scalar values become its columns, as
    text. Consecutive lines with the same picture and columns, each with a question, become one item with all these
    questions.

    A malformed line gives one item with an error of code "manifest" and the label `FILE:LINE`. Raises `InputsError` if
    the file is unusable as a whole, and OSError if reading fails later.
    """
    key = lambda item: (item.source, item.columns) if item.questions else object()  # noqa: E731 - an argument
    for _, alike in groupby(_lines_as_inputs(path), key=key):
        while items := list(islice(alike, _MAX_QUESTIONS)):
            yield replace(
                items[0],
                questions=tuple(question for item in items for question in item.questions),
                found_in=tuple(line for item in items for line in item.found_in),
            )


def check_manifest(path: str, *, needs_questions: bool = False) -> None:
    """Raise `InputsError` if the beginning of a manifest shows that it is unusable as a whole."""
    check_suffix(path, what="manifest")
    check_lines(path, what="manifest")
    if can_read_again(path):
        first = next(read_rows(path, what="manifest"), None)
        if first is not None and not first.problem:
            hint = "give the pictures' column one of these names"
            _check_column(first.values, PICTURE_COLUMNS, path=path, hint=hint)
            if needs_questions and not path.lower().endswith(".jsonl"):  # lines of JSON may have different columns
                hint = "give the questions' column one of these names, or one question for all as --question"
                _check_column(first.values, PROMPT_COLUMNS, path=path, hint=hint)


def _lines_as_inputs(path: str) -> Iterator[PictureInput]:
    root = os.path.dirname(path)
    for row in read_rows(path, what="manifest"):
        try:
            if row.problem:
                raise ValueError(row.problem)
            yield _input(row.values, root=root, found_in=(f"{path}:{row.line}",))
        except ValueError as error:
            yield _faulty(path, line=row.line, reason=str(error))


def _input(values: Mapping[str, object], *, root: str, found_in: tuple[str, ...]) -> PictureInput:
    """The item of one line. Raises ValueError, which gives the reason, for malformed values."""
    column = first_column(values, of=PICTURE_COLUMNS)
    if column is None:
        raise ValueError(f"it has none of the columns {', '.join(PICTURE_COLUMNS)}")
    name = values[column]
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"`{column}` is not the name of a file")
    question = question_fields(values)
    spoken_for = question_columns(values)
    path = name if ADDRESS.match(name) else os.path.join(root, name)
    return PictureInput(
        source=path,
        label=path,
        root=root or ".",
        found_in=found_in,
        columns=as_columns({name: value for name, value in values.items() if name not in spoken_for}),
        questions=() if question is None else (question,),
    )


def _check_column(values: Mapping[str, object], names: tuple[str, ...], *, path: str, hint: str) -> None:
    if first_column(values, of=names) is None:
        got = ", ".join(map(shown_name, values)) or "none"
        raise InputsError(
            f"Wanted one of the columns {', '.join(names)} in the manifest `{shown_name(path)}`, got {got}.", hint=hint
        )


def _faulty(path: str, *, line: int, reason: str) -> PictureInput:
    label = f"{path}:{line}"
    message = f"Wanted a picture and its question in the line `{shown_name(label)}`, but {reason}; correct that line."
    return PictureInput.failed(label, "manifest", message, source=path, root=os.path.dirname(path) or ".")
