"""What is asked of pictures: instructions, perhaps with variables to fill in for each picture. No model, no tokens."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from llama_adapter.app.inputs import QuestionFields
from llama_adapter.app.records.picture_names import name_as_text
from llama_adapter.app.tasks.prompts import Prompt, RawPrompt
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked of a picture; nothing given means the model's own caption prompt."""

    instruction: str | None = None
    input: str | None = None
    raw: str | None = None
    choices: tuple[str, ...] | None = None

    def prompt(self, default: str) -> Prompt:
        """As the captioner takes it."""
        if self.raw is not None:
            return RawPrompt(self.raw)
        instruction = default if self.instruction is None else self.instruction
        return instruction if self.input is None else (instruction, self.input)

    def shown(self, default: str) -> str:
        """As a record shows it."""
        if self.raw is not None:
            return self.raw
        instruction = default if self.instruction is None else self.instruction
        return instruction if self.input is None else f"{instruction}\n{self.input}"

    @property
    def form(self) -> str:
        """What the shown prompt is; with `input`, it tells apart prompts that are shown alike."""
        return "instruction" if self.raw is None else "raw"

    @property
    def is_caption(self) -> bool:
        """Whether it is the model's own caption prompt."""
        return self.instruction is None and self.raw is None

    @property
    def variables(self) -> frozenset[str]:
        """Names of the variables in it."""
        return frozenset(match[1] for text in self._texts() for match in _PIECES.finditer(text) if match[1])

    @property
    def is_template(self) -> bool:
        """Whether anything in it is to be filled in."""
        return any(_PIECES.search(text) for text in self._texts())

    def completed(self, own: QuestionFields) -> "Question":
        """A question as a file says it; what that leaves open is as here."""
        return Question(
            instruction=self.instruction if own.instruction is None else own.instruction,
            input=self.input if own.input is None else own.input,
            raw=self.raw if own.instruction is None else None,
            choices=self.choices if own.choices is None else own.choices,
        )

    def filled(self, variables: Mapping[str, str]) -> "Question":
        """The question for one picture. Raises TemplateError for a variable that is not there."""
        if not self.is_template:
            return self
        instruction, given, raw = (_filled(text, variables) for text in (self.instruction, self.input, self.raw))
        return replace(self, instruction=instruction, input=given, raw=raw)

    def _texts(self) -> Iterator[str]:
        return (text for text in (self.instruction, self.input, self.raw) if text is not None)


def questions_about(own: Sequence[QuestionFields], *, common: Sequence[Question]) -> list[Question]:
    """What is asked of a picture that came with questions of its `own`, or with none; `common` are the job's.

    What an own question leaves open is as in the first of the job's. One that has no instruction, only an input or
    choices, is each of the job's with these.
    """
    if not own:
        return list(common)
    return [question.completed(one) for one in own for question in common[: 1 if one.instruction is not None else None]]


def picture_variables(label: str, columns: Mapping[str, str]) -> dict[str, str]:
    """What a prompt may name of a picture: `PICTURE_VARIABLES` of its name, and the columns it came with."""
    label = name_as_text(label)
    path = PurePosixPath(label)
    own = {"stem": path.stem, "name": path.name, "parent": path.parent.name, "path": label}
    return {**own, **columns}


def _filled(text: str | None, variables: Mapping[str, str]) -> str | None:
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
