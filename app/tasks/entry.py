"""An entry of the task registry: its command, its options, and the question that they make."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llama_adapter.app.tasks.question import Question


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A value that a task takes from its user."""

    name: str  # `instruction`, `input` and `raw` make the prompt
    flag: str  # of the command line
    help: str
    metavar: str = "TEXT"
    parse: Callable[[str], Any] = str  # raises ValueError


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskEntry:
    """A task as front ends offer it. Entries with the same command share it, and the last one that applies is used."""

    name: str
    command: str
    help: str = ""  # one line for the list of commands; the first entry of a command has it
    description: str = ""
    options: tuple[Option, ...]
    question: Callable[[Mapping[str, Any]], Question | None]  # None: these values are not for this task
    needs_instruction: bool = False  # there is no default prompt
    has_probabilities: bool = False  # its answers can be thresholded and calibrated
