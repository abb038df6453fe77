"""`run-reference`."""

import argparse
import dataclasses
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from llama_adapter.app.command_line.flags import add_flags, command
from llama_adapter.app.command_line.parser import Parser
from llama_adapter.app.command_line.values import settings
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.settings.yaml_file import as_given
from llama_adapter.runtime.terminal.stderr_lines import say


class _Unset:
    """The default of a flag whose value the program chooses."""

    def __repr__(self) -> str:
        return "the program's, else that of `caption`"


_UNSET = _Unset()


def add_reference(commands: Any, *, run: Callable[[Sequence[str]], int]) -> None:
    """Add `run-reference`. `run` runs a command line of this program."""
    runs = partial(_run_reference, run)
    command(commands, "run-reference", runs, declare=_declare)


def _declare(reference: Parser) -> None:
    add_flags(reference, "model", "run-reference")
    reference.set_defaults(**{field.name: _UNSET for field in dataclasses.fields(CaptionerSpec)})


def _run_reference(run: Callable[[Sequence[str]], int], options: argparse.Namespace) -> int:
    from llama_adapter.app.compat import foreign
    from llama_adapter.app.compat.imported import EXPORT, setting_of_export

    given = {one.setting.dest: one.value for one in options.effective if one.value is not _UNSET}
    script, *arguments = words = [options.script, *options.arguments]
    if (imported := foreign.import_line(words)) is not None:
        say(imported.format_report(), end="")
        imported.check()
        tables = imported.settings
        for one in options.effective:
            if one.value is _UNSET:
                continue
            setting = f"{one.setting.section}.{one.setting.key}"
            if tables["command"] == EXPORT and not (setting := setting_of_export(setting, one.value)):
                say(f"note: `{one.setting.shown} {one.value}` is ignored: an export does not need it")
            else:
                section, _, key = setting.partition(".")
                tables.setdefault(section, {})[key] = one.value
        ours = _command_line(options.parser.root.commands(), tables)
        say(f"runs: llama-adapter {shlex.join(ours)}")
        return run(ours)
    (script, *arguments), num_devices = foreign.without_launcher(words)
    if isinstance(num_devices, int) and num_devices > 1:
        given.setdefault("tensor_parallel", num_devices)
    while arguments and re.fullmatch(r"(.*/)?python[\d.]*|-[^\WcmWX]+", script):  # Python, and switches without a value
        script, *arguments = arguments
    program = {} if "model" in given else {"llama_dir": "of the program", "adapter": "of the program"}
    settings(CaptionerSpec, program | given)  # raises UsageError for flags that exclude each other
    from llama_adapter.app.compat.reference.run import run_program

    return run_program(script, arguments, overrides=given)


def _command_line(commands: Mapping[str, Parser], tables: Mapping[str, Any]) -> list[str]:
    """The command with these settings (section -> key -> value) as words. Raises UsageError for one that it lacks."""
    name: str = tables["command"]
    left = {
        (section, key): value
        for section, table in tables.items()
        if section != "command"
        for key, value in table.items()
    }
    words = name.split()
    for setting in commands[name].settings():
        value = as_given(left.pop((setting.section, setting.key), None), setting.key)
        if value is not None and setting.flags:
            words.append(setting.flags[setting.read(value)])
        elif value is not None:
            words += [f"{setting.shown}={text}" for text in ([value] if isinstance(value, str) else value)]
    for _, key in left:
        raise UsageError(f"`{name}` has no setting named `{key}`", hint=f"see `llama-adapter {name} --help all`")
    return words
