"""The tasks that front ends offer. A new task is a file in this folder and a line here, or an installed package."""

import contextlib
import functools
import logging
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from llama_adapter.app.captioning.tasks.choose import CHOOSE
from llama_adapter.app.captioning.tasks.entry import PROMPT_OPTIONS, Option, TaskEntry
from llama_adapter.app.captioning.tasks.free_text import ASK, CAPTION, TEXT_GENERATION
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.runtime.errors import UsageError

GROUP: Final = "llama_adapter.tasks"  # group of entry points, each of them a `TaskEntry`
TASKS: dict[str, TaskEntry] = {entry.name: entry for entry in (CAPTION, ASK, CHOOSE, TEXT_GENERATION)}

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_log = logging.getLogger("llama_adapter.tasks")  # if the program has no log handler, warnings go to stderr


def tasks() -> tuple[TaskEntry, ...]:
    """All tasks, those of installed packages last. A task that cannot be loaded is left out, with a warning."""
    return (*TASKS.values(), *installed().values())


def get_task(name: str) -> TaskEntry:
    """The task with this name. Raises UsageError, which lists the known names, if there is none."""
    known = {entry.name: entry for entry in tasks()}
    if name not in known:
        raise UsageError(f"No task named `{name}`", hint=f"there are {', '.join(known)}")
    return known[name]


@functools.cache
def installed() -> Mapping[str, TaskEntry]:
    """The tasks of installed packages, by name: entry points of the group `llama_adapter.tasks`. Loaded once."""
    if not _is_group_named():
        return {}
    from importlib.metadata import entry_points

    found: dict[str, TaskEntry] = {}
    for point in sorted(entry_points(group=GROUP)):
        package = "?" if point.dist is None else point.dist.name
        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout is for answers
                entry = point.load()
            _check(entry, [*TASKS.values(), *found.values()])
            found[entry.name] = entry
        except (Exception, SystemExit) as error:
            _log.warning(
                "note: the task `%s` of the package `%s` is left out (%s: %s)",
                point.name,
                package,
                type(error).__name__,
                error,
            )
    return found


def _is_group_named() -> bool:
    """Whether any package declares the group. Files are searched, as importing `importlib.metadata` would be slow."""
    named = GROUP.encode()
    for folder in sys.path:
        for file in Path(folder).glob("*-info/entry_points.txt"):
            try:
                if named in file.read_bytes():
                    return True
            except OSError:
                continue
    return False


def _check(entry: object, others: list[TaskEntry]) -> None:
    """Raise TypeError or ValueError if a package's entry is invalid or conflicts with other tasks."""
    if not isinstance(entry, TaskEntry):
        raise TypeError(f"it is no TaskEntry but {type(entry).__name__}")
    for name in (entry.name, entry.command):
        if not _NAME.fullmatch(name):
            raise ValueError(f"`{name}` is no name of a task or command")
    if any(other.name == entry.name for other in others):
        raise ValueError("there is a task of that name already")
    if any(other.command == entry.command for other in others):
        raise ValueError(f"the command `{entry.command}` belongs to another task")
    for other in (option for one in others for option in one.options):
        for option in entry.options:
            if option.name == other.name and option.name not in PROMPT_OPTIONS:
                raise ValueError(f"its option `{option.name}` belongs to another task")
            if option.request is not None and other.request is not None and option.request.name == other.request.name:
                raise ValueError(f"its field `{option.request.name}` belongs to another task")


def entries_by_command() -> dict[str, list[TaskEntry]]:
    """The entries of each command, in the order of the registry."""
    commands: dict[str, list[TaskEntry]] = {}
    for entry in tasks():
        commands.setdefault(entry.command, []).append(entry)
    return commands


def options() -> list[Option]:
    """The options of all tasks."""
    return [option for entry in tasks() for option in entry.options]


def question_of(values: Mapping[str, Any], *, command: str | None = None) -> Question:
    """Make the question from values of options, by name. `command` restricts the tasks to those of one command.

    The task is the one that has an exclusive option among the values, or else the first task. Raises ValueError; the
    message uses the names of options.
    """
    entries = [entry for entry in tasks() if command in (None, entry.command)]
    chosen = [entry for entry in entries if entry.is_chosen_by(values)]
    if len(chosen) > 1:
        raise ValueError(f"The tasks {' and '.join(entry.name for entry in chosen)} exclude each other")
    return (chosen or entries)[0].question(values)
