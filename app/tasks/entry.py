"""An entry of the task registry: what every front end offers of a task, and the question that its values make."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llama_adapter.app.tasks.question import Question

PROMPT_OPTIONS = ("instruction", "input", "raw")  # every front end has its own way to ask for these


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestField:
    """A field of HTTP requests, beside OpenAI's own."""

    name: str
    description: str
    min_texts: int | None = None  # None: one text; else a list of at least this many different texts
    aliases: tuple[str, ...] = ()  # other servers' names of the same field


@dataclass(frozen=True, kw_only=True, slots=True)
class Widget:
    """A text box on the page; `Option.parse` reads its text."""

    label: str
    info: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A value that a task takes from its user."""

    name: str
    flag: str  # of the command line
    help: str
    metavar: str = "TEXT"
    parse: Callable[[str], Any] = str  # raises ValueError
    separator: str | None = None  # between the items of its text, which files may give as a list
    request: RequestField | None = None
    widget: Widget | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskEntry:
    """A task as front ends offer it. Entries may share a command."""

    name: str
    command: str
    takes: str = "a picture"  # for people
    answers: str = "text"
    needs_picture: bool = True  # False: its command takes prompts alone
    help: str = ""  # one line for the list of commands; the first entry of a command has it
    description: str = ""
    options: tuple[Option, ...]
    question: Callable[[Mapping[str, Any]], Question]  # raises ValueError
    needs_instruction: bool = False  # there is no default prompt
    has_probabilities: bool = False  # its answers can be thresholded and calibrated

    def is_chosen_by(self, values: Mapping[str, Any]) -> bool:
        """Whether an option that only this task has is given."""
        own = (option.name for option in self.options if option.name not in PROMPT_OPTIONS)
        return any(values.get(name) is not None for name in own)
