"""The tasks that front ends offer. A new one is a file in this folder and a line here."""

from collections.abc import Mapping
from typing import Any

from llama_adapter.app.tasks.ask import ASK
from llama_adapter.app.tasks.caption import CAPTION
from llama_adapter.app.tasks.choose import CHOOSE
from llama_adapter.app.tasks.entry import Option, TaskEntry
from llama_adapter.app.tasks.question import Question

TASKS: dict[str, TaskEntry] = {entry.name: entry for entry in (CAPTION, ASK, CHOOSE)}


def entries_by_command() -> dict[str, list[TaskEntry]]:
    """The entries of each command, in the order of the registry."""
    commands: dict[str, list[TaskEntry]] = {}
    for entry in TASKS.values():
        commands.setdefault(entry.command, []).append(entry)
    return commands


def options() -> list[Option]:
    """The options of all tasks."""
    return [option for entry in TASKS.values() for option in entry.options]


def question_of(values: Mapping[str, Any], *, command: str | None = None) -> Question:
    """The question that values of options make, by name; `command` restricts the tasks to those of one command.

    The task is the one with an option of its own among the values, else the first. Raises ValueError with the names of
    options.
    """
    entries = [entry for entry in TASKS.values() if command in (None, entry.command)]
    chosen = [entry for entry in entries if entry.is_chosen_by(values)]
    if len(chosen) > 1:
        raise ValueError(f"The tasks {' and '.join(entry.name for entry in chosen)} exclude each other")
    return (chosen or entries)[0].question(values)
