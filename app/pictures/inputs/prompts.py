"""Files of prompts, each of which becomes one item without a picture, and sheets of questions about every picture."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from llama_adapter.app.pictures.inputs.fields import KNOWN_COLUMNS, PROMPT_COLUMNS, first_column, named, question_fields
from llama_adapter.app.pictures.inputs.items import InputsError, PictureInput, QuestionFields
from llama_adapter.app.pictures.inputs.lines import STDIN, check_lines, text_lines
from llama_adapter.app.pictures.inputs.tables import check_table, read_rows
from llama_adapter.runtime.text import shown_name

_WHAT, _SHEET = "file of prompts", "sheet of questions"
_COLUMNS = (*PROMPT_COLUMNS, "src")  # PaddleNLP's data files use src
_KNOWN = KNOWN_COLUMNS | {"src", "tgt"}
_Row = tuple[int, Any]  # line number, and a text, an object, or a ValueError for a malformed row


def prompt_inputs(path: str, *, are_raw: bool = False) -> Iterator[PictureInput]:
    """The prompts of a file, in its order, without pictures.

    In a `.txt` file, and on stdin (`-`), each line that is not blank is a prompt. A table (`read_rows`) has a column
    prompt (or question, instruction, src), and optionally input and choices; a list in JSON may also hold texts. With
    `are_raw`, prompts are given to the model without the instruction template, and a list as src, the rounds of a
    dialogue, is its first one, as in PaddleNLP for models without a chat template.

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
    elif isinstance(turns := value.get("src"), list) and (len(turns) == 1 or (turns and are_raw)):
        value = {**value, "src": turns[0]}
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
    target = target[0] if isinstance(target, list) and target else target
    return {"tgt": target} if isinstance(target, str) else {}


def _is_text(path: str) -> bool:
    return path == STDIN or path.lower().endswith(".txt")


def read_question_sheet(path: str) -> tuple[QuestionFields, ...]:
    """The questions of a file, in its order; at least one.

    In a `.txt` file, each line is a question, except blank lines and comments; a comment begins with `# ` or is `#`
    alone. A table (`read_rows`) has a column prompt (or question, or instruction), and optionally input and choices;
    other columns are ignored.

    Raises `InputsError`, which names the line, for malformed and repeated questions, and for files that are empty or
    unreadable.
    """
    is_text = path.lower().endswith(".txt")
    first_lines: dict[QuestionFields, int] = {}
    try:
        for line, question in _text_questions(path) if is_text else _table_questions(path):
            first = first_lines.setdefault(question, line)
            if first != line:
                raise _faulty_question(path, line=line, reason=f"it is the same as that of line {first}")
    except OSError as error:
        raise InputsError(f"Wanted to read `{shown_name(path)}`, but the system says: {error.strerror}.") from None
    if not first_lines:
        raise InputsError(f"Wanted questions in `{shown_name(path)}`, which has none.", hint="write one in each line")
    return tuple(first_lines)


def _text_questions(path: str) -> Iterator[tuple[int, QuestionFields]]:
    for number, text in text_lines(path, what=_SHEET):
        if isinstance(text, ValueError):
            raise _faulty_question(path, line=number, reason=str(text))
        if text != "#" and not text.startswith("# "):
            yield number, QuestionFields(instruction=text)


def _table_questions(path: str) -> Iterator[tuple[int, QuestionFields]]:
    for row in read_rows(path, what=_SHEET, wanted=PROMPT_COLUMNS):
        try:
            if row.problem:
                raise ValueError(row.problem)
            if (column := first_column(row.values, of=PROMPT_COLUMNS)) is None:
                raise ValueError(f"it has none of the columns {named(PROMPT_COLUMNS)}")
            question = question_fields(row.values)
            if question is None or question.instruction is None:
                raise ValueError(f"its cell `{column}` is empty")
        except ValueError as error:
            raise _faulty_question(path, line=row.line, reason=str(error)) from None
        yield row.line, question


def _faulty_question(path: str, *, line: int, reason: str) -> InputsError:
    return InputsError(
        f"Wanted a question in `{shown_name(path)}`, line {line}, but {reason}.", hint="correct that line"
    )
