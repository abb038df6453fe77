"""Converts settings of other systems, recognised by their keys. Reads YAML, JSON, and command lines in text files."""

import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from llama_adapter.app.compat import mindformers_settings, model_runner_settings, paddlenlp_settings
from llama_adapter.app.compat.imported import Imported
from llama_adapter.app.settings.setting import SECTIONS
from llama_adapter.app.settings.yaml_file import COMMAND_SUFFIXES, Table, read_content, read_yaml
from llama_adapter.runtime.errors import UsageError

_SYSTEMS = (model_runner_settings, paddlenlp_settings, mindformers_settings)


class Importer(Protocol):
    """Converts settings of another system."""

    def __call__(self, data: Mapping[str, Any], *, source: str = "settings") -> Imported: ...


_NO_LAUNCHER = "leave out a launcher and its quotation marks: the command begins with `python`"


def recognise(data: Mapping[str, Any]) -> Importer | None:
    """The importer for settings of another system; None if they are not of a known system.

    The importer takes the mapping and `source`, a name for messages. It raises UsageError for a key that is not
    supported, with its line if tables have `lines`.
    """
    system = _system_of(data)
    return None if system is None else partial(_import_strictly, system)


def import_file(path: str) -> Imported:
    """The settings in a file of another system: YAML, JSON, or a command line in a .txt or .sh file.

    The report lists keys that are not supported. Raises UsageError if the file is not of a known system or cannot be
    read, and OSError.
    """
    data = read_command(path) if path.endswith(COMMAND_SUFFIXES) else read_yaml(path)
    system = _system_of(data)
    if system is None:
        if data.keys() <= {"command", *SECTIONS}:
            raise UsageError(f"`{path}` has our own settings already", hint=f"pass it as `--config {path}`")
        raise UsageError(
            f"`{path}` has the settings of no known system: its keys are {', '.join(map(str, data)) or 'none'}",
            hint="known are ModelRunner's YAML, PaddleNLP's predictor options, and MindFormers' predict YAML",
        )
    imported: Imported = system.import_settings(data)
    return imported


def _system_of(data: Mapping[str, Any]) -> Any:
    return next((system for system in _SYSTEMS if system.is_ours(data)), None)


def _import_strictly(system: Any, data: Mapping[str, Any], *, source: str = "settings") -> Imported:
    imported: Imported = system.import_settings(data)
    return imported.check(source)


def read_command(path: str) -> Table:
    """The options of a command line, which may have several lines, as a table with line numbers.

    As in MindFormers, options of the command line override those of `--config FILE`. Raises UsageError with the line.
    """
    options = Table()
    name: str | None = None
    for number, text in enumerate(read_content(path).splitlines(), start=1):
        try:
            words = shlex.split(text.rstrip().removesuffix("\\"), comments=True)
        except ValueError as error:
            raise UsageError(f"{path}:{number}: this is no command line: {error}", hint=_NO_LAUNCHER) from None
        for word in words:
            if word.startswith("--"):
                name, equals, value = word.removeprefix("--").partition("=")
                if name in options:
                    raise UsageError(f"{path}:{number}: `--{name}` is given twice, first in line {options.lines[name]}")
                options[name], options.lines[name] = _typed(value) if equals else True, number
                name = None if equals else name
            elif name is not None:
                options[name], name = _typed(word), None
            elif options:
                raise UsageError(f"{path}:{number}: `{word}` belongs to no option")
    if isinstance(config := options.get("config"), str):
        beside = Path(path).parent / config
        table = read_yaml(str(beside if beside.exists() else Path(config)))
        options.lines = {**table.lines, **options.lines}
        options.update({key: value for key, value in table.items() if key not in options})
        del options["config"]
    return options


def _typed(text: str) -> Any:
    """The value of a word, converted as in the parsers of the other systems."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
