"""Sheets of questions: files with questions that are asked about every picture."""

from collections.abc import Iterator

from llama_adapter.app.pictures.inputs.fields import PROMPT_COLUMNS, first_column, named, question_fields
from llama_adapter.app.pictures.inputs.items import InputsError, QuestionFields
from llama_adapter.app.pictures.inputs.lines import text_lines
from llama_adapter.app.pictures.inputs.tables import read_rows
from llama_adapter.runtime.text import shown_name

_WHAT = "sheet of questions"


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
                raise _faulty(path, line=line, reason=f"it is the same as that of line {first}")
    except OSError as error:
        raise InputsError(f"Wanted to read `{shown_name(path)}`, but the system says: {error.strerror}.") from None
    if not first_lines:
        raise InputsError(f"Wanted questions in `{shown_name(path)}`, which has none.", hint="write one in each line")
    return tuple(first_lines)


def _text_questions(path: str) -> Iterator[tuple[int, QuestionFields]]:
    for number, text in text_lines(path, what=_WHAT):
        if isinstance(text, ValueError):
            raise _faulty(path, line=number, reason=str(text))
        if text != "#" and not text.startswith("# "):
            yield number, QuestionFields(instruction=text)


def _table_questions(path: str) -> Iterator[tuple[int, QuestionFields]]:
    for row in read_rows(path, what=_WHAT, wanted=PROMPT_COLUMNS):
        try:
            if row.problem:
                raise ValueError(row.problem)
            if (column := first_column(row.values, of=PROMPT_COLUMNS)) is None:
                raise ValueError(f"it has none of the columns {named(PROMPT_COLUMNS)}")
            question = question_fields(row.values)
            if question is None or question.instruction is None:
                raise ValueError(f"its cell `{column}` is empty")
        except ValueError as error:
            raise _faulty(path, line=row.line, reason=str(error)) from None
        yield row.line, question


def _faulty(path: str, *, line: int, reason: str) -> InputsError:
    return InputsError(
        f"Wanted a question in `{shown_name(path)}`, line {line}, but {reason}.", hint="correct that line"
    )
