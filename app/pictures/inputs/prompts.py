"""Files of prompts, each of which becomes one item without a picture, and sheets of questions about every picture."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from llama_adapter.app.pictures.inputs.fields import KNOWN_COLUMNS, PROMPT_COLUMNS, first_column, named, question_fields
from llama_adapter.app.pictures.inputs.items import InputsError, PictureInput, QuestionFields, Row
from llama_adapter.app.pictures.inputs.lines import STDIN, check_lines, prompt_lines
from llama_adapter.app.pictures.inputs.tables import check_suffix, check_table, read_rows
from llama_adapter.runtime.text import shown_name

_WHAT, _SHEET = "file of prompts", "sheet of questions"
_COLUMNS = (*PROMPT_COLUMNS, "src")  # PaddleNLP's data files use src
_KNOWN = KNOWN_COLUMNS | {"src", "tgt"}


def prompt_inputs(path: str, *, are_raw: bool = False) -> Iterator[PictureInput]:
    """The prompts of a file, in its order, without pictures.

    In a `.txt` file, and on stdin (`-`), each line that is not blank is a prompt. A table (`read_rows`) has a column
    prompt (or question, instruction, src) or input, and optionally choices; a list in JSON may also hold texts. With
    `are_raw`, prompts are given to the model without the instruction template, and a list as src, the rounds of a
    dialogue, is its first one, as in PaddleNLP for models without a chat template.

    Labels are `FILE#ROW`. A malformed row gives one item with an error of code "prompt" and the label `FILE:ROW`.
    Raises `InputsError` if the file is unusable as a whole, and OSError if reading fails later.
    """
    name, has_any = "stdin" if path == STDIN else path, False
    for row in _rows(path, what=_WHAT, wanted=(*_COLUMNS, "input"), known=_KNOWN):
        has_any = True
        line = f"{name}:{row.line}"
        try:
            question = _question(row.checked(), are_raw=are_raw)
        except ValueError as error:
            message = f"Wanted a prompt in `{shown_name(line)}`, but {error}; correct that line."
            yield PictureInput.failed(line, "prompt", message, source=path)
        else:
            label, columns = f"{name}#{row.line}", _target(row.values)
            yield PictureInput(source=None, label=label, found_in=(line,), columns=columns, questions=(question,))
    if not has_any:
        message = f"Wanted prompts in `{shown_name(name)}`, which has none."
        yield PictureInput.failed(name, "prompt", message, source=path)


def check_prompts(path: str, *, needs_questions: bool = False) -> None:
    """Raise `InputsError` if a file of prompts is unusable as a whole, as far as it can be read more than once."""
    if _is_text(path):
        check_lines(path, what=_WHAT)
    else:
        check_table(path, what=_WHAT, wanted=_COLUMNS if needs_questions else (*_COLUMNS, "input"))


def _rows(path: str, *, what: str, wanted: Sequence[str], known: Collection[str] = KNOWN_COLUMNS) -> Iterator[Row]:
    return prompt_lines(path, what=what) if _is_text(path) else read_rows(path, what=what, wanted=wanted, known=known)


def _is_text(path: str) -> bool:
    return path == STDIN or path.lower().endswith(".txt")


def _question(values: Mapping[str, object], *, are_raw: bool) -> QuestionFields:
    """The question of a row. Raises ValueError, which gives the reason, for a malformed row."""
    turns = values.get("src")
    if isinstance(turns, list) and (len(turns) == 1 or (turns and are_raw)):
        values = {**values, "src": turns[0]}
    question = question_fields(values, of=_COLUMNS)
    if question is None:
        raise ValueError(f"it has no text in one of the columns {', '.join(_COLUMNS)}")
    if not are_raw:
        return question
    if question.input is not None:
        raise ValueError("an `input` cannot be used with a raw prompt")
    return replace(question, instruction=None, raw=question.instruction)


def _target(values: Mapping[str, object]) -> dict[str, str]:
    """The answer that PaddleNLP's data files have beside `src`."""
    target = values.get("tgt")
    target = target[0] if isinstance(target, list) and target else target
    return {"tgt": target} if isinstance(target, str) else {}


def read_question_sheet(path: str) -> tuple[QuestionFields, ...]:
    """The questions of a file, in its order; at least one.

    In a `.txt` file, each line is a question, except blank lines and comments; a comment begins with `# ` or is `#`
    alone. A table (`read_rows`) has a column prompt (or question, or instruction), and optionally input and choices;
    other columns are ignored.

    Raises `InputsError`, which names the line, for malformed and repeated questions, and for files that are empty or
    unreadable.
    """
    if path == STDIN:  # only a file of prompts may be stdin
        check_suffix(path, what=_SHEET)
    first_lines: dict[QuestionFields, int] = {}
    try:
        for row in _rows(path, what=_SHEET, wanted=PROMPT_COLUMNS):
            text = row.values.get("prompt")
            if _is_text(path) and isinstance(text, str) and (text == "#" or text.startswith("# ")):
                continue
            try:
                first = first_lines.setdefault(_sheet_question(row.checked()), row.line)
                if first != row.line:
                    raise ValueError(f"it is the same as that of line {first}")
            except ValueError as error:
                message = f"Wanted a question in `{shown_name(path)}`, line {row.line}, but {error}."
                raise InputsError(message, hint="correct that line") from None
    except OSError as error:
        raise InputsError(f"Wanted to read `{shown_name(path)}`, but the system says: {error.strerror}.") from None
    if not first_lines:
        raise InputsError(f"Wanted questions in `{shown_name(path)}`, which has none.", hint="write one in each line")
    return tuple(first_lines)


def _sheet_question(values: Mapping[str, object]) -> QuestionFields:
    """The question of a row, which has a text. Raises ValueError, which gives the reason."""
    if (column := first_column(values, of=PROMPT_COLUMNS)) is None:
        raise ValueError(f"it has none of the columns {named(PROMPT_COLUMNS)}")
    question = question_fields(values)
    if question is None or question.instruction is None:
        raise ValueError(f"its cell `{column}` is empty")
    return question
