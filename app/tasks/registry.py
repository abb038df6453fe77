"""The tasks that front ends offer. A new one is a file in this folder and a line here."""

from collections.abc import Mapping
from typing import Any

from llama_adapter.app.tasks.ask import ASK
from llama_adapter.app.tasks.caption import CAPTION
from llama_adapter.app.tasks.choose import CHOOSE
from llama_adapter.app.tasks.entry import TaskEntry
from llama_adapter.app.tasks.question import Question

TASKS: dict[str, TaskEntry] = {entry.name: entry for entry in (CAPTION, ASK, CHOOSE)}


def entries_by_command() -> dict[str, list[TaskEntry]]:
    """The entries of each command, in the order of the registry."""
    commands: dict[str, list[TaskEntry]] = {}
    for entry in TASKS.values():
        commands.setdefault(entry.command, []).append(entry)
    return commands


def question_of(command: str, values: Mapping[str, Any]) -> Question:
    """The question that the values of a command's options make. Raises ValueError, with the names of options."""
    questions = (entry.question(values) for entry in reversed(entries_by_command()[command]))
    return next(question for question in questions if question is not None)
