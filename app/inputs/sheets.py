"""Sheets of questions: files with questions that are asked about every picture."""

import os
from collections.abc import Iterator

from llama_adapter.app.inputs.fields import PROMPT_COLUMNS, first_column, question_fields
from llama_adapter.app.inputs.items import InputsError, QuestionFields
from llama_adapter.app.inputs.lines import MAX_LINE_BYTES, opened_lines, read_beginning, split_lines
from llama_adapter.app.inputs.tables import TABLE_SUFFIXES, read_rows
from llama_adapter.runtime.text import shown_name


def read_question_sheet(path: str) -> tuple[QuestionFields, ...]:
    """The questions of a file, in its order; at least one.

    In a `.txt` file, each line is a question, except blank lines and comments; a comment begins with `# ` or is `#`
    alone. A `.jsonl`, `.csv` or `.tsv` file has a column prompt (or question, or instruction), and optionally input and
    choices; other columns are ignored.

    Raises `InputsError`, which names the line, for malformed and repeated questions, and for files that are empty or
    unreadable.
    """
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in (".txt", *TABLE_SUFFIXES):
        raise InputsError(
            f"Wanted a sheet of questions that is called .txt, .jsonl, .csv or .tsv, got `{shown_name(path)}`.",
            hint="its suffix says how it is read: rename or convert it",
        )
    first_lines: dict[QuestionFields, int] = {}
    try:
        for line, question in _text_questions(path) if suffix == ".txt" else _table_questions(path):
            first = first_lines.setdefault(question, line)
            if first != line:
                raise _faulty(path, line=line, reason=f"it is the same as that of line {first}")
    except OSError as error:
        raise InputsError(f"Wanted to read `{shown_name(path)}`, but the system says: {error.strerror}.") from None
    if not first_lines:
        raise InputsError(f"Wanted questions in `{shown_name(path)}`, which has none.", hint="write one in each line")
    return tuple(first_lines)


def _text_questions(path: str) -> Iterator[tuple[int, QuestionFields]]:
    with opened_lines(path, what="sheet of questions") as file:
        begun = read_beginning(file, path=path, what="sheet of questions")
        for number, line in split_lines(file, begun=begun):
            if line is None:
                raise _faulty(path, line=number, reason=f"it has more than {MAX_LINE_BYTES:,} bytes")
            try:
                text = line.decode().strip()
            except UnicodeDecodeError:
                raise _faulty(path, line=number, reason="it is not UTF-8") from None
            if text and text != "#" and not text.startswith("# "):
                yield number, QuestionFields(instruction=text)


def _table_questions(path: str) -> Iterator[tuple[int, QuestionFields]]:
    for row in read_rows(path, what="sheet of questions"):
        try:
            if row.problem:
                raise ValueError(row.problem)
            if first_column(row.values, of=PROMPT_COLUMNS) is None:
                raise ValueError(f"it has none of the columns {', '.join(PROMPT_COLUMNS)}")
            question = question_fields(row.values)
            if question is None or question.instruction is None:
                raise ValueError("the question is empty")
        except ValueError as error:
            raise _faulty(path, line=row.line, reason=str(error)) from None
        yield row.line, question


def _faulty(path: str, *, line: int, reason: str) -> InputsError:
    return InputsError(
        f"Wanted a question in `{shown_name(path)}`, line {line}, but {reason}.", hint="correct that line"
    )
