"""Labelled data as plain values: examples, and problems of the data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from llama_adapter.app.pictures.inputs import InputsError, PictureInput, QuestionFields
from llama_adapter.app.pictures.inputs.items import LeftOut
from llama_adapter.runtime.text import shown_name, shown_text

Task = Literal["choice", "answer", "caption"]  # one of a fixed set; a free answer; a description
MOST_NAMED = 10  # choices that a default question lists
LISTING = "Which of these is it: "
_MOST_SHOWN = 20


class Choices(tuple[str, ...]):
    """Choices that many examples share. They are hashed once, and equal to themselves without a comparison."""

    _hash: int

    def __hash__(self) -> int:
        if "_hash" not in self.__dict__:
            self._hash = tuple.__hash__(self)
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or tuple.__eq__(self, other)

    def __reduce__(self) -> tuple[Any, ...]:  # another process has other hashes
        return Choices, (tuple(self),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A picture, or none, with a question and its right answers."""

    item: PictureInput  # without a picture, its `source` is None
    question: QuestionFields  # its `choices` are None; if its instruction is None, the command's question is asked
    task: Task
    answers: tuple[str, ...]  # right answers, at least one; training learns the first
    choices: tuple[str, ...] | None = None  # for the task "choice": at least two, including all `answers`
    has_turns: bool = False  # from a conversation, where a question may have several answers
    part: str = ""  # part of the data that is reported separately, such as POPE's adversarial; "": none
    split: str = ""  # split that the data name: train, validation, test or another; "": none
    place: str  # where the example is, for messages: file and line, archive or folder
    line: int = 0  # line in its file, from 1; 0: it has none
    digest: str = ""  # SHA-256 of the picture's bytes, hexadecimal; "": not read, or there is no picture


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A problem of the data."""

    place: str  # file and line, archive, folder or picture
    reason: str
    is_warning: bool = False  # whether the data are usable nevertheless
    unreadable: Example | None = None  # if the problem is a missing or unreadable picture: its example

    def __str__(self) -> str:
        return f"{shown_text(self.place)}: {shown_text(self.reason)}"


@dataclass(slots=True)
class Examples:
    """The usable examples, the problems of the data, and what is left out."""

    examples: list[Example] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    left_out: LeftOut = field(default_factory=LeftOut)

    def extend(self, other: "Examples") -> None:
        """Add the examples and problems of `other`."""
        self.examples += other.examples
        self.problems += other.problems
        self.left_out.extend(other.left_out)

    def refuse(self, place: str, reason: str, *, unreadable: Example | None = None) -> None:
        """Add an error; `unreadable` is the example whose picture is missing or cannot be read."""
        self.problems.append(Problem(place=place, reason=reason, unreadable=unreadable))

    def warn(self, place: str, reason: str) -> None:
        """Add a warning."""
        self.problems.append(Problem(place=place, reason=reason, is_warning=True))

    def require_sound(self, place: str = "", *, needs_all_pictures: bool = True) -> None:
        """Raise InputsError, which lists the errors, if there are errors or no examples.

        `place` names the data in the message that there are none. Without `needs_all_pictures`, missing and unreadable
        pictures are errors only if no example is left.
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
            where = f" in `{shown_name(place)}`" if place else ""
            raise InputsError(
                f"Wanted labelled data{where}, got none.", hint="docs/labelled-data.md shows the forms of data"
            )


def class_question(choices: Sequence[str]) -> str:
    """The default question for these choices."""
    return "Which class is this?" if len(choices) > MOST_NAMED else f"{LISTING}{', '.join(choices)}?"


def shown_problems(problems: Iterable[Problem]) -> list[str]:
    """Problems as lines without repetitions. If there are more than 20, the last line has the number of the others."""
    lines = list(dict.fromkeys(map(str, problems)))
    rest = len(lines) - _MOST_SHOWN
    return lines[:_MOST_SHOWN] + ([f"and {rest:,} more"] if rest > 0 else [])
