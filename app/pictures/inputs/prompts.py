"""Files of prompts: each prompt becomes one item without a picture."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from llama_adapter.app.pictures.inputs.fields import KNOWN_COLUMNS, PROMPT_COLUMNS, question_fields
from llama_adapter.app.pictures.inputs.items import PictureInput, QuestionFields
from llama_adapter.app.pictures.inputs.lines import STDIN, check_lines, text_lines
from llama_adapter.app.pictures.inputs.tables import check_table, read_rows
from llama_adapter.runtime.text import shown_name

_WHAT = "file of prompts"
_COLUMNS = (*PROMPT_COLUMNS, "src")  # PaddleNLP's data files use src
_KNOWN = KNOWN_COLUMNS | {"src", "tgt"}
_Row = tuple[int, Any]  # line number, and a text, an object, or a ValueError for a malformed row


def prompt_inputs(path: str, *, are_raw: bool = False) -> Iterator[PictureInput]:
    """The prompts of a file, in its order, without pictures.

    In a `.txt` file, and on stdin (`-`), each line that is not blank is a prompt. A table (`read_rows`) has a column
    prompt (or question, instruction, src), and optionally input and choices; a list in JSON may also hold texts. With
    `are_raw`, prompts are given to the model without the instruction template.

    Labels are `FILE#ROW`. A malformed row gives one item with an error of code "prompt" and the label `FILE:ROW`.
    Raises `InputsError` if the file is unusable as a whole, and OSError if reading fails later.
    """
    name, has_any = "stdin" if path == STDIN else path, False
    for row, value in _rows(path):
        has_any = True
        line = f"{name}:{row}"
        try:
            question = _question(value, are_raw=are_raw)
        except ValueError as error:
            message = f"Wanted a prompt in `{shown_name(line)}`, but {error}; correct that line."
            yield PictureInput.failed(line, "prompt", message, source=path)
        else:
            label, columns = f"{name}#{row}", _target(value)
            yield PictureInput(source=None, label=label, found_in=(line,), columns=columns, questions=(question,))
    if not has_any:
        message = f"Wanted prompts in `{shown_name(name)}`, which has none."
        yield PictureInput.failed(name, "prompt", message, source=path)


def check_prompts(path: str) -> None:
    """Raise `InputsError` if a file of prompts is unusable as a whole, as far as it can be read more than once."""
    if _is_text(path):
        check_lines(path, what=_WHAT)
    else:
        check_table(path, what=_WHAT, wanted=_COLUMNS)


def _rows(path: str) -> Iterator[_Row]:
    if _is_text(path):
        yield from text_lines(path, what=_WHAT)
        return
    for row in read_rows(path, what=_WHAT, wanted=_COLUMNS, known=_KNOWN):
        yield row.line, ValueError(row.problem) if row.problem else row.values


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


def _is_text(path: str) -> bool:
    return path == STDIN or path.lower().endswith(".txt")
