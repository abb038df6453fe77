"""What is asked of pictures: instructions, perhaps with variables to fill in for each picture. No model, no tokens."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from llama_adapter.app.inputs import QuestionFields
from llama_adapter.app.records.picture_names import name_as_text
from llama_adapter.app.tasks.choose import OneOf
from llama_adapter.app.tasks.question import Question
from llama_adapter.runtime.errors import ExitCode, LlamaAdapterError

# `{stem}` is a variable, `{{` and `}}` are braces; whatever else stands in braces, such as JSON, stays as it is.
_PIECES = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}")
PICTURE_VARIABLES = ("stem", "name", "parent", "path")


class TemplateError(LlamaAdapterError):
    """A prompt names a variable that this picture does not have."""

    exit_code = ExitCode.USAGE
    http_status = 400

    def __init__(self, name: str, *, known: Mapping[str, str]) -> None:
        super().__init__(
            f"The prompt wants the variable {{{name}}}, and there is only {', '.join(sorted(known))}",
            hint=f"write {{{{{name}}}}} for the text {{{name}}} itself",
        )


def variables_of(question: Question) -> frozenset[str]:
    """Names of the variables in a question."""
    return frozenset(match[1] for text in question.texts() for match in _PIECES.finditer(text) if match[1])


def is_template(question: Question) -> bool:
    """Whether anything in a question is to be filled in."""
    return any(_PIECES.search(text) for text in question.texts())


def complete(question: Question, own: QuestionFields) -> Question:
    """A question as a file gives it; fields that the file leaves out are those of `question`."""
    return Question(
        instruction=question.instruction if own.instruction is None else own.instruction,
        input=question.input if own.input is None else own.input,
        raw=question.raw if own.instruction is None else None,
        task=question.task if own.choices is None else OneOf(own.choices),
    )


def fill(question: Question, variables: Mapping[str, str]) -> Question:
    """The question for one picture. Raises TemplateError for an unknown variable."""
    if not is_template(question):
        return question
    instruction, given, raw = (_fill(text, variables) for text in (question.instruction, question.input, question.raw))
    return replace(question, instruction=instruction, input=given, raw=raw)


def questions_about(own: Sequence[QuestionFields], *, common: Sequence[Question]) -> list[Question]:
    """What is asked of a picture that came with questions of its `own`, or with none; `common` are the job's.

    What an own question leaves open is as in the first of the job's. One that has no instruction, only an input or
    choices, is each of the job's with these.
    """
    if not own:
        return list(common)
    return [complete(question, one) for one in own for question in common[: 1 if one.instruction is not None else None]]


def picture_variables(label: str, columns: Mapping[str, str]) -> dict[str, str]:
    """What a prompt may name of a picture: `PICTURE_VARIABLES` of its name, and the columns it came with."""
    label = name_as_text(label)
    path = PurePosixPath(label)
    own = {"stem": path.stem, "name": path.name, "parent": path.parent.name, "path": label}
    return {**own, **columns}


def _fill(text: str | None, variables: Mapping[str, str]) -> str | None:
    if text is None:
        return None

    def piece(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return match[0][0]
        if name not in variables:
            raise TemplateError(name, known=variables)
        return variables[name]

    return _PIECES.sub(piece, text)
