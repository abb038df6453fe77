"""Files of prompts: each prompt becomes one item without a picture."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from llama_adapter.app.inputs.fields import PROMPT_COLUMNS, question_fields
from llama_adapter.app.inputs.items import InputsError, PictureInput, QuestionFields
from llama_adapter.app.inputs.lines import (
    MAX_LINE_BYTES,
    STDIN,
    can_read_again,
    check_lines,
    opened_lines,
    read_beginning,
    split_lines,
)
from llama_adapter.app.inputs.tables import TABLE_SUFFIXES, read_rows
from llama_adapter.runtime.text import shown_name

_WHAT = "file of prompts"
_COLUMNS = (*PROMPT_COLUMNS, "src")  # PaddleNLP's data files use src
_Row = tuple[int, Any]  # line number, and a text, an object, or a ValueError for a malformed row


def prompt_inputs(path: str, *, are_raw: bool = False) -> Iterator[PictureInput]:
    """The prompts of a file, in its order, without pictures.

    In a `.txt` file, and on stdin (`-`), each line that is not blank is a prompt. A `.jsonl`, `.csv` or `.tsv` file has
    a column prompt (or question, instruction, src), and optionally input and choices. A `.json` file contains a list of
    texts or of objects with these keys, or lines of objects with src. With `are_raw`, prompts are given to the model
    without the instruction template.

    Labels are `FILE#ROW`. A malformed row gives one item with an error of code "prompt" and the label `FILE:ROW`.
    Raises `InputsError` if the file is unusable as a whole, and OSError if reading fails later.
    """
    name = "stdin" if path == STDIN else path
    for row, value in _rows(path):
        line = f"{name}:{row}"
        try:
            question = _question(value, are_raw=are_raw)
        except ValueError as error:
            message = f"Wanted a prompt in `{shown_name(line)}`, but {error}; correct that line."
            yield PictureInput.failed(line, "prompt", message, source=path)
        else:
            label, columns = f"{name}#{row}", _target(value)
            yield PictureInput(source=None, label=label, found_in=(line,), columns=columns, questions=(question,))


def check_prompts(path: str) -> None:
    """Raise `InputsError` if a file of prompts is unusable as a whole."""
    if path != STDIN and _suffix(path) not in (".txt", ".json", *TABLE_SUFFIXES):
        raise InputsError(
            f"Wanted a {_WHAT} that is called .txt, .json, .jsonl, .csv or .tsv, got `{shown_name(path)}`.",
            hint="its suffix says how it is read: rename or convert it",
        )
    check_lines(path, what=_WHAT)
    if path != STDIN and _suffix(path) == ".json":
        if not can_read_again(path):
            raise InputsError(
                f"Wanted a {_WHAT}, and `{shown_name(path)}` is a pipe or a device.",
                hint="`.json` is read as a whole, more than once; `.jsonl` is read line by line",
            )
        _json_rows(path)


def _rows(path: str) -> Iterator[_Row]:
    if path == STDIN or _suffix(path) == ".txt":
        return _text_rows(path)
    if _suffix(path) == ".json":
        return iter(_json_rows(path))
    rows = read_rows(path, what=_WHAT)
    return ((row.line, ValueError(row.problem) if row.problem else row.values) for row in rows)


def _text_rows(path: str) -> Iterator[_Row]:
    with opened_lines(path, what=_WHAT) as file:
        begun = read_beginning(file, path=path, what=_WHAT)
        for number, line in split_lines(file, begun=begun):
            if line is None:
                yield number, ValueError(f"it has more than {MAX_LINE_BYTES:,} bytes")
            elif line.strip():
                try:
                    yield number, line.decode().strip()
                except UnicodeDecodeError:
                    yield number, ValueError("it is not UTF-8")


def _json_rows(path: str) -> list[_Row]:
    try:
        with open(path, "rb") as file:
            text = file.read().decode("utf-8-sig")
        try:
            rows = json.loads(text)
        except json.JSONDecodeError:
            rows = _sources(json.loads(line) for line in text.split("\n") if line.strip())
        if isinstance(rows, dict):
            rows = _sources([rows])
    except (ValueError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        rows = None
    if not isinstance(rows, list):
        raise InputsError(
            f"Wanted a list of prompts in JSON, and `{shown_name(path)}` has none.",
            hint='write ["a text", {"prompt": "another", "input": "..."}], or a .jsonl file with one object a line',
        )
    return list(enumerate(rows, start=1))


def _sources(rows: Iterable[Any]) -> list[Any] | None:
    """The rows, if all are objects of PaddleNLP's data files (JSON lines with src); otherwise None."""
    found = list(rows)
    return found if found and all(isinstance(row, Mapping) and "src" in row for row in found) else None


def _question(value: Any, *, are_raw: bool) -> QuestionFields:
    """The question of a row. Raises ValueError, which gives the reason, for a malformed row."""
    if isinstance(value, ValueError):
        raise value
    if not isinstance(value, Mapping):
        value = {"prompt": value}
    elif "src" in value and isinstance(value["src"], list) and len(value["src"]) == 1:
        value = {**value, "src": value["src"][0]}
    question = question_fields(value, of=_COLUMNS)
    if question is None:
        raise ValueError(f"it has no text in one of the columns {', '.join(_COLUMNS)}")
    if not are_raw:
        return question
    if question.input is not None:
        raise ValueError("an `input` cannot be used with a raw prompt")
    return replace(question, instruction=None, raw=question.instruction)


def _target(value: Any) -> dict[str, str]:
    """The answer that PaddleNLP's data files have beside `src`."""
    target = value.get("tgt") if isinstance(value, Mapping) else None
    target = target[0] if isinstance(target, list) and len(target) == 1 else target
    return {"tgt": target} if isinstance(target, str) else {}


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()
