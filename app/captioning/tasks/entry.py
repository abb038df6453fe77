"""Entries of the task registry: a task as all front ends offer it, and how its values become a question."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llama_adapter.app.captioning.tasks.question import Question

PROMPT_OPTIONS = ("instruction", "input", "raw")  # each front end has its own fields for these


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestField:
    """A field of HTTP requests, in addition to OpenAI's fields."""

    name: str
    description: str
    min_texts: int | None = None  # None: one text; otherwise a list of different texts, at least as many
    aliases: tuple[str, ...] = ()  # names of the same field in other servers


@dataclass(frozen=True, kw_only=True, slots=True)
class Widget:
    """A text box on the page; `Option.parse` reads its text."""

    label: str
    info: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A value that the user gives to a task."""

    name: str
    flag: str  # its name on the command line
    help: str
    metavar: str = "TEXT"
    parse: Callable[[str], Any] = str  # raises ValueError
    separator: str | None = None  # between the items of a text; settings files may then give a list
    request: RequestField | None = None
    widget: Widget | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskEntry:
    """A task, described for all front ends. Several entries may share a command."""

    name: str
    command: str
    takes: str = "a picture"  # shown to the user, as is `answers`
    answers: str = "text"
    needs_picture: bool = True  # False: its command takes prompts without pictures
    help: str = ""  # one line for the list of commands; only in a command's first entry
    description: str = ""
    options: tuple[Option, ...]
    question: Callable[[Mapping[str, Any]], Question]  # raises ValueError
    needs_instruction: bool = False  # whether there is no default prompt
    has_probabilities: bool = False  # whether thresholds and calibration apply to its answers

    def is_chosen_by(self, values: Mapping[str, Any]) -> bool:
        """Whether the values give an option that only this task has."""
        own = (option.name for option in self.options if option.name not in PROMPT_OPTIONS)
        return any(values.get(name) is not None for name in own)
