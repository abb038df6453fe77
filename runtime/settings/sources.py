"""Resolves the value of every setting of a command: from the command line, the environment, a file or the default."""

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.settings.setting import PREFIX, SECTIONS, Given, Setting, meant, nearest
from llama_adapter.runtime.settings.yaml_file import Entry, SettingsFile

_KUBERNETES = re.compile(r"(tcp|udp)://")  # Kubernetes sets LLAMA_ADAPTER_PORT if a service is named llama-adapter

Commands = Callable[[], Mapping[str, Collection[Setting]]]  # all commands, with their settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Effective:
    """The value of one setting, and its source."""

    setting: Setting
    value: Any
    kind: Literal["flag", "variable", "file", "default"]
    source: str  # the flag, the variable, `run.yaml:7` or "default"

    @property
    def name(self) -> str:
        """The setting's name for messages, as the user gave it."""
        return f"{self.setting.key} ({self.source})" if self.kind == "file" else self.source


def resolve(
    settings: Sequence[Setting],
    *,
    command: str,
    given: Mapping[str, Any],
    file: SettingsFile | None,
    variables: Mapping[str, str],
    commands: Commands,
) -> list[Effective]:
    """The value of each setting. `given` are the values of the command line, by `dest`; they take precedence.

    `variables` are additional names of environment variables, by `dest`; they take precedence over LLAMA_ADAPTER_KEY.
    Raises UsageError, which names the line or variable, for invalid values and names.
    """
    _check_variables(settings, commands)
    entries = {} if file is None else _matched(file, settings, command=command, commands=commands)
    found = []
    for setting in settings:
        if setting.dest in given:
            value = given[setting.dest]
            flag = setting.flags[value] if setting.flags else setting.shown
            found.append(Effective(setting=setting, value=value, kind="flag", source=flag))
        elif variable := _set_variable(setting, variables):
            value = _read(setting, _items(setting, os.environ[variable]), variable)
            found.append(Effective(setting=setting, value=value, kind="variable", source=variable))
        elif (entry := entries.get(setting.key)) and entry.given is not None:
            value = _read(setting, entry.given, f"{entry.place}: {entry.key}")
            found.append(Effective(setting=setting, value=value, kind="file", source=entry.place))
        else:
            value = setting.read(setting.default) if isinstance(setting.default, str) else setting.default
            found.append(Effective(setting=setting, value=value, kind="default", source="default"))
    return found


def by_section(effective: Iterable[Effective], *, command: str) -> dict[str, Any]:
    """Values by section and key, in the form of a settings file."""
    tables: dict[str, Any] = {"command": command}
    for one in effective:
        value = list(one.value) if isinstance(one.value, tuple) else one.value
        tables.setdefault(one.setting.section, {})[one.setting.key] = value
    return tables


def to_run_again(effective: Iterable[Effective], *, command: str) -> dict[str, Any]:
    """The settings for the manifest of a run, without those by which repeating the run would replace its results."""
    given = (one for one in effective if one.value not in (None, [], ()))
    kept = (one for one in given if one.setting.key not in ("overwrite", "force"))
    return by_section(kept, command=command)


def _read(setting: Setting, given: Given, place: str) -> Any:
    try:
        return setting.read(given)
    except ValueError as error:
        raise UsageError(f"{place}: {error}") from None


def _set_variable(setting: Setting, variables: Mapping[str, str]) -> str | None:
    """The environment variable that sets this setting, if any. An empty variable is ignored."""
    for name in (variables.get(setting.dest), setting.variable):
        if name and os.environ.get(name) and not (name == f"{PREFIX}PORT" and _KUBERNETES.match(os.environ[name])):
            return name
    return None


def _items(setting: Setting, text: str) -> Given:
    """The text of a variable; for a list setting, a JSON list of texts gives several items."""
    if setting.is_list and text.startswith("["):
        import json

        try:
            items = json.loads(text)
        except (ValueError, RecursionError):
            return text
        if all(isinstance(item, str) for item in items):
            return list(items)
    return text


def _check_variables(settings: Sequence[Setting], commands: Commands) -> None:
    """Raise UsageError for a variable whose name is similar to that of a setting.

    Variables for other commands and for other programs are allowed.
    """
    own = {setting.variable for setting in settings}
    unknown = [name for name in os.environ if name.startswith(PREFIX) and name not in own]
    if not unknown:
        return
    known = {setting.variable for found in commands().values() for setting in found} | own
    for name in sorted(set(unknown) - known):
        if similar := nearest(name.removeprefix(PREFIX), [one.removeprefix(PREFIX) for one in known], cutoff=0.85):
            raise UsageError(f"{name}: no setting has this variable", hint=f"{PREFIX}{similar} may be meant")


def _matched(file: SettingsFile, settings: Sequence[Setting], *, command: str, commands: Commands) -> dict[str, Entry]:
    """The entries of a file by key. Raises UsageError for entries that are not settings of the command."""
    if file.command not in (None, command):
        known = commands()
        hint = f"use it with `llama-adapter {file.command}`" if file.command in known else meant(file.command, known)
        raise UsageError(
            f"{file.command_place}: the file is for `{file.command}`, and the command is `{command}`", hint=hint
        )
    own = {setting.key: setting for setting in settings}
    for entry in file.entries:
        if entry.key not in own or own[entry.key].section != entry.section:
            raise _unknown(entry, own, command=command, commands=commands())
    return {entry.key: entry for entry in file.entries}


def _unknown(
    entry: Entry, own: Mapping[str, Setting], *, command: str, commands: Mapping[str, Collection[Setting]]
) -> UsageError:
    everywhere = {setting.key: setting for found in commands.values() for setting in found} | dict(own)
    setting = everywhere.get(entry.key)
    if setting is not None and setting.section != entry.section:
        where = f"`{entry.section}`" if entry.section else "the top level"
        return UsageError(f"{entry.place}: `{entry.key}` belongs to the section `{setting.section}`, not to {where}")
    if setting is not None:
        having = [name for name, found in commands.items() if entry.key in {setting.key for setting in found}]
        return UsageError(
            f"{entry.place}: `{entry.key}` is a setting of {', '.join(having)}, not of {command}",
            hint=_similar_flag(entry.key, own),
        )
    if entry.section is None:
        hint = meant(entry.key, [*SECTIONS, *everywhere]) or f"sections are {', '.join(SECTIONS)}"
        return UsageError(f"{entry.place}: no section is named `{entry.key}`", hint=hint)
    return UsageError(
        f"{entry.place}: no setting is named `{entry.key}`",
        hint=_similar_flag(entry.key, own) or meant(entry.key, own) or meant(entry.key, everywhere),
    )


def _similar_flag(key: str, own: Mapping[str, Setting]) -> str:
    """A hint for a key that is the name of a flag, if the setting's key differs: `--list` sets `lists`."""
    flags = {setting.shown.lstrip("-").replace("-", "_"): setting.key for setting in own.values()}
    return f"`{flags[key]}` may be meant" if key in flags else ""
