"""Settings files in YAML. PyYAML is imported when needed."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.settings.setting import SECTIONS, Given

_WIDE_COLON = "\uff1a"  # of Chinese texts, which editors put in place of a colon
MAX_CONFIG_BYTES = 2**20
MAX_CONFIG_VALUES = 100_000  # including values that aliases repeat


class Table(dict[str, Any]):
    """A mapping in a file, as plain values. `lines` has the line of each key, counted from 1, if known.

    `source` is the file, if known, and `files` the other files from which keys were added.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}
        self.files: dict[str, str] = {}
        self.source = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A key of a file with its value."""

    section: str | None  # None: `key` is at the top level, where only sections are allowed
    key: str
    given: Given | None
    place: str  # `run.yaml:7`


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingsFile:
    """The settings that a file gives."""

    command: str | None
    command_place: str
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()  # about keys of another system that have no effect here


def read_content(path: str, *, hint: str = "") -> str:
    """The text of a file of settings. Raises UsageError if it cannot be read (`hint`), is too large or not UTF-8."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"Cannot read `{path}`: {reason}", hint=hint) from None
    if len(content) > MAX_CONFIG_BYTES:
        raise UsageError(f"`{path}` has more than {MAX_CONFIG_BYTES:,} bytes, which is too much for settings")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"`{path}` is not UTF-8: byte {error.start + 1} is not") from None


def read_yaml(path: str, *, content: str | None = None, as_written: bool = False) -> Table:
    """The mapping in a YAML file. With `as_written`, its scalars are texts or None.

    `content` is the text of the file, if it was read already. Raises UsageError, which names the line, for other
    content, duplicate keys and too many values, and for a file that cannot be read.
    """
    import yaml

    if content is None:
        content = read_content(path)
    loader = None
    try:
        loader = yaml.SafeLoader(content)
        node = loader.get_single_node()
        if node is None:
            return Table()
        if not isinstance(node, yaml.MappingNode):
            raise UsageError(
                f"{path}:{node.start_mark.line + 1}: wanted sections such as `model:`, got something else",
                hint=_hint_on_colons(node.value),
            )
        scalar = _as_written if as_written else loader.construct_object
        table: Table = _Walk(path, scalar).plain(node)
        table.source = path
        return table
    except yaml.reader.ReaderError as error:
        raise UsageError(f"`{path}` has a character that YAML does not allow, number {error.position + 1}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, near = "", ""
        if mark is not None:
            line, first = f":{mark.line + 1}", (error.context_mark or mark).line
            near = "".join(content.splitlines(keepends=True)[first : mark.line + 1])
        hint = _hint_on_colons(near)
        raise UsageError(f"{path}{line}: this is not YAML: {error.problem or error.context}", hint=hint) from None
    except RecursionError:
        raise UsageError(f"`{path}` cannot be read: nested too deeply") from None
    finally:
        if loader is not None:
            loader.dispose()


def _hint_on_colons(text: object) -> str:
    is_wide = isinstance(text, str) and _WIDE_COLON in text
    return f"write `:` in place of the full-width `{_WIDE_COLON}`" if is_wide else ""


def _as_written(node: Any) -> str | None:
    return None if node.tag == "tag:yaml.org,2002:null" else node.value


class _Walk:
    """Converts YAML nodes to plain values. Their number is limited, because aliases may repeat a node without end."""

    def __init__(self, path: str, scalar: Callable[[Any], Any]) -> None:
        self._path, self._scalar, self._num_left = path, scalar, MAX_CONFIG_VALUES

    def plain(self, node: Any) -> Any:
        line = node.start_mark.line + 1
        self._num_left -= 1
        if self._num_left < 0:
            raise UsageError(f"{self._path}:{line}: more than {MAX_CONFIG_VALUES:,} values, with those of aliases")
        if node.id != "scalar" and not node.tag.endswith((":seq", ":map")):
            raise UsageError(f"{self._path}:{line}: wanted plain values, got the tag {node.tag}")
        if node.id == "sequence":
            return [self.plain(item) for item in node.value]
        if node.id == "scalar":
            try:
                value = self._scalar(node)
                str(value)  # raises for a hexadecimal number of thousands of digits, which cannot be shown
            except (ValueError, OverflowError) as error:
                raise UsageError(f"{self._path}:{line}: {error}") from None
            return value
        table = Table()
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = str(key_node.value) if key_node.id == "scalar" else "?"
            if key in table:
                raise UsageError(f"{self._path}:{line}: `{key}` is given twice, first in line {table.lines[key]}")
            table.lines[key] = line
            table[key] = self.plain(value_node)
        return table


def settings_in(data: Mapping[str, Any], path: str) -> SettingsFile:
    """The settings in the mapping of a file. Raises UsageError, which names the line, for values of other types."""

    def place(table: Mapping[str, Any], key: str) -> str:
        line = getattr(table, "lines", {}).get(key)
        return path if line is None else f"{path}:{line}"

    command = data.get("command")
    if not isinstance(command, str | None):
        raise UsageError(f"{place(data, 'command')}: wanted the name of a command, got something else")
    entries = []
    for section, table in data.items():
        if section in SECTIONS and not isinstance(table, Mapping | None):
            raise UsageError(
                f"{place(data, section)}: {section} is a section: its settings are indented below it",
                hint=_hint_on_colons(table),
            )
        if section not in ("command", *SECTIONS):
            entries.append(Entry(section=None, key=section, given=None, place=place(data, section)))
        for key, value in (table or {}).items() if section in SECTIONS else ():
            where = place(table, key)
            entries.append(Entry(section=section, key=key, given=as_given(value, f"{where}: {key}"), place=where))
    return SettingsFile(command=command, command_place=place(data, "command"), entries=tuple(entries))


def as_given(value: Any, place: str) -> Given | None:
    """The text of a value, or of each item of a list. Raises UsageError, which begins with `place`, for other types."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        texts = [as_given(item, place) for item in value]
        if all(isinstance(text, str) for text in texts):
            return [str(text) for text in texts]
    raise UsageError(f"{place}: wanted a value or a list of values, got something else")
