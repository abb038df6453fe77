"""What labelled data consist of, as plain values: examples, and what is wrong with the rest."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from llama_adapter.app.inputs import InputsError, PictureInput, QuestionFields
from llama_adapter.runtime.text import shown_text

Task = Literal["choice", "answer", "caption"]  # one of a fixed set; a text of its own; a description
_MOST_SHOWN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A picture, or none, with a question and its right answers."""

    item: PictureInput  # its `source` is None without a picture
    question: QuestionFields  # its `choices` are None; instruction None: the command's question
    task: Task
    answers: tuple[str, ...]  # right ones, at least one; the first is the one to learn
    choices: tuple[str, ...] | None = None  # of the task "choice": at least two, and all answers are among them
    part: str = ""  # a part of the data that is reported by itself, such as POPE's adversarial; "": none
    split: str = ""  # which the data themselves name: train, validation, test or another; "": none
    place: str  # for messages: file and line, archive or folder
    line: int = 0  # in its file, from 1; 0: it has none
    digest: str = ""  # SHA-256 of the picture's bytes, hexadecimal; "": not read, or there is no picture


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Something that is wrong with the data."""

    place: str  # file and line, archive, folder or picture
    reason: str
    is_warning: bool = False  # whether the data are usable in spite of it
    unreadable: Example | None = None  # whose picture is missing or cannot be read, if that is what is wrong

    def __str__(self) -> str:
        return f"{shown_text(self.place)}: {shown_text(self.reason)}"


@dataclass(slots=True)
class Examples:
    """The usable examples, and what is wrong with the data."""

    examples: list[Example] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def extend(self, other: "Examples") -> None:
        """Add another's examples and problems."""
        self.examples += other.examples
        self.problems += other.problems

    def refuse(self, place: str, reason: str, *, unreadable: Example | None = None) -> None:
        """Add an error; `unreadable` is the example whose picture is missing or cannot be read."""
        self.problems.append(Problem(place=place, reason=reason, unreadable=unreadable))

    def warn(self, place: str, reason: str) -> None:
        """Add a warning."""
        self.problems.append(Problem(place=place, reason=reason, is_warning=True))

    def require_sound(self, *, needs_all_pictures: bool = True) -> None:
        """Raise InputsError, which lists what is wrong, if there are errors or no examples.

        Without `needs_all_pictures`, missing and unreadable pictures are no errors while there are others.
        """
        counts = needs_all_pictures or not self.examples
        errors = [one for one in self.problems if not one.is_warning and (counts or one.unreadable is None)]
        if errors:
            raise InputsError(
                f"Wanted labelled data without errors, got {len(errors):,}:",
                hint="correct or remove these",
                details=shown_problems(errors),
            )
        if not self.examples:
            raise InputsError("Wanted labelled data, got none.", hint="docs/labelled-data.md shows the forms of data")


def shown_problems(problems: Iterable[Problem]) -> list[str]:
    """Problems as lines, each once; of many, the first 20 and how many more there are."""
    lines = list(dict.fromkeys(map(str, problems)))
    rest = len(lines) - _MOST_SHOWN
    return lines[:_MOST_SHOWN] + ([f"and {rest:,} more"] if rest > 0 else [])
