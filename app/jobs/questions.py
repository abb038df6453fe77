"""The questions of a job about each picture: their variables such as {stem}, and their number."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from llama_adapter.app.captioning.tasks.choose import OneOf
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.pictures.inputs import PictureInput, QuestionFields, count_inputs, may_bring_columns
from llama_adapter.app.pictures.names import name_as_text
from llama_adapter.runtime.errors import ExitCode, LlamaAdapterError, UsageError

# `{stem}` is a variable; `{{` and `}}` stand for single braces. Other text in braces, such as JSON, is left unchanged.
_PIECES = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}")


class TemplateError(LlamaAdapterError):
    """A prompt names a variable that this picture does not have."""

    exit_code = ExitCode.USAGE
    http_status = 400

    def __init__(self, name: str, *, known: Mapping[str, str]) -> None:
        super().__init__(
            f"The prompt wants the variable {{{name}}}, and there is only {', '.join(sorted(known))}",
            hint=f"write {{{{{name}}}}} for the text {{{name}}} itself",
        )


def is_template(question: Question) -> bool:
    """Whether a question contains variables or doubled braces."""
    return any(_PIECES.search(text) for text in question.texts())


def complete(question: Question, own: QuestionFields) -> Question:
    """The question with the fields that a file gives in `own`; fields that the file leaves out come from `question`."""
    return Question(
        instruction=question.instruction if own.instruction is None else own.instruction,
        input=question.input if own.input is None else own.input,
        raw=question.raw if own.instruction is None and own.raw is None else own.raw,
        task=question.task if own.choices is None else OneOf(own.choices),
    )


def fill(question: Question, variables: Mapping[str, str]) -> Question:
    """The question for one picture. Raises TemplateError for an unknown variable."""
    instruction, given, raw = (_fill(text, variables) for text in (question.instruction, question.input, question.raw))
    return replace(question, instruction=instruction, input=given, raw=raw)


def questions_about(own: Sequence[QuestionFields], *, common: Sequence[Question]) -> list[Question]:
    """The questions about a picture: `own` are the picture's (may be empty), `common` are the job's.

    Without own questions, the job's questions are asked. An own question with an instruction takes its missing fields
    from the first of the job's questions. An own question without an instruction gives one question for each of the
    job's, with its input or choices replaced.
    """
    if not own:
        return list(common)
    return [complete(question, one) for one in own for question in common[: 1 if one.instruction is not None else None]]


def picture_variables(label: str, columns: Mapping[str, str]) -> dict[str, str]:
    """The variables of a picture: stem, name, parent and path, from its name, and the columns of its table row."""
    label = name_as_text(label)
    path = PurePosixPath(label)
    own = {"stem": path.stem, "name": path.name, "parent": path.parent.name, "path": label}
    return {**own, **columns}


def check_variables(job: Job) -> None:
    """Raise UsageError if a question names a variable that no picture of the job can have."""
    if not job.fills_variables or may_bring_columns(job.inputs):
        return
    for question in job.questions:
        try:
            fill(question, picture_variables("", {}))
        except TemplateError as error:
            raise UsageError(str(error), hint=error.hint) from None


def count_answers(job: Job, *, addresses: bool = False) -> int | None:
    """The number of answers of the whole job; None if it is not known before the job ends."""

    def size(picture: PictureInput) -> int:
        return job.n * len(questions_about(() if job.is_encoding else picture.questions, common=job.questions))

    if job.items is not None:
        return sum(map(size, job.items))
    return count_inputs(job.inputs, size=size, addresses=addresses)


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
