"""Manifests: tables with a picture in each row, and optionally its own question and columns for templates."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby, islice

from llama_adapter.app.pictures.inputs.fields import (
    PICTURE_COLUMNS,
    PROMPT_COLUMNS,
    TURNS,
    as_columns,
    asked_rows,
    first_column,
    named,
    question_columns,
    question_fields,
    row_picture,
)
from llama_adapter.app.pictures.inputs.items import InputsError, PictureInput
from llama_adapter.app.pictures.inputs.tables import JSON_SUFFIXES, check_table, read_rows
from llama_adapter.runtime.text import shown_name

_WHAT = "manifest"
_MAX_QUESTIONS = 1024  # per item; a picture with more questions gives several items and is read again


def manifest_inputs(path: str) -> Iterator[PictureInput]:
    """The pictures of a table (`read_rows`), in the order of its lines.

    The picture is in the first existing column of picture, image, file_name, filename and path (so Hugging Face's
    metadata.jsonl is a manifest): a path relative to the manifest's folder, or an object with its `bytes`. The columns
    prompt (or question, or instruction), input and choices give the picture's own question; `questions` and
    `conversations` give several. All other scalar values become its columns, as text. Consecutive lines with the same
    picture and columns, each with a question, become one item with all these questions.

    A malformed line, or the first of those in Parquet that cannot be read, gives one item with an error of code
    "manifest" and the label `FILE:LINE`; a manifest without lines gives one with its own name. Raises `InputsError` if
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
    """Raise `InputsError` if a manifest is unusable as a whole, as far as it can be read more than once.

    Rows of Parquet are not read.
    """
    first = check_table(path, what=_WHAT, wanted=PICTURE_COLUMNS)
    if needs_questions and first is not None:
        if path.lower().endswith(JSON_SUFFIXES):  # objects may have different fields
            return
        if not first.problem and first_column(first.values, of=PROMPT_COLUMNS) is None:
            raise InputsError(
                f"Wanted one of the columns {named(PROMPT_COLUMNS)} in the manifest `{shown_name(path)}`, got "
                f"{', '.join(map(shown_name, first.values))}.",
                hint="give the questions' column one of these names, or one question for all as --question",
            )


def _lines_as_inputs(path: str) -> Iterator[PictureInput]:
    root, has_any = os.path.dirname(path), False
    for row in read_rows(path, what=_WHAT, wanted=PICTURE_COLUMNS):
        has_any = True
        try:
            rows = asked_rows(row.checked(), has_picture=True)
            if TURNS in row.values:  # their answers would make a picture's questions differ by a column
                rows = [{name: value for name, value in one.items() if name != "answer"} for one in rows]
            items = [_input(one, root=root, place=f"{path}:{row.line}") for one in rows]
        except ValueError as error:
            yield _faulty(f"{path}:{row.line}", path=path, reason=str(error))
        else:
            yield from items
    if not has_any:
        yield _faulty(path, path=path, reason="it names none")


def _input(values: Mapping[str, object], *, root: str, place: str) -> PictureInput:
    """The item of one question. Raises ValueError, which gives the reason, for malformed values."""
    item = row_picture(values, root=root, place=place)
    if item is None:
        raise ValueError(f"it has no picture in a column {named(PICTURE_COLUMNS)}")
    question = question_fields(values)
    columns = as_columns(values, without=question_columns(values))
    return replace(item, columns=columns, questions=() if question is None else (question,))


def _faulty(label: str, *, path: str, reason: str) -> PictureInput:
    message = f"Wanted a picture and its question in `{shown_name(label)}`, but {reason}; correct that line."
    return PictureInput.failed(label, "manifest", message, source=path, root=os.path.dirname(path) or ".")
