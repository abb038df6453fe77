"""Effective settings as YAML with the source of each, and all settings as a JSON schema."""

import json
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from llama_adapter.runtime.settings.setting import SECTIONS, Setting
from llama_adapter.runtime.text import shown_text

_PLAIN = re.compile(r"(\.{0,2}/)?[A-Za-z_][\w/.+-]*", re.ASCII)
_NO_TEXTS = re.compile(r"(?i)y|n|yes|no|on|off|true|false|null|\.inf|\.nan")  # need quotes to be read as text
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")  # YAML cannot hold or keep these

_TYPES: Mapping[Any, str] = {int: "integer", float: "number"}


def format_settings(settings: Mapping[str, Any], *, sources: Mapping[str, str] | None = None) -> str:
    """The text of a settings file, by section and key, with a comment for each key in `sources`."""
    lines = [f"command: {_format(settings['command'])}"] if settings.get("command") else []
    for section in SECTIONS:
        table = settings.get(section) or {}
        lines += [f"{section}:"] if table else []
        for key, value in table.items():
            comment = f"  # {shown_text(sources[key])}" if sources and key in sources else ""
            lines.append(f"  {key}: {_format(value)}{comment}")
    return "\n".join(lines) + "\n"


def _format(value: Any) -> str:
    """A value as YAML on one line. Values that cannot be written as text become null."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_format, value))}]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and not _NO_TEXTS.fullmatch(value):
        return value
    if not isinstance(value, str | int | float | None):
        return "null"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = json.dumps(value, ensure_ascii=False)
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def json_schema(commands: Mapping[str, Collection[Setting]]) -> dict[str, Any]:
    """A JSON schema (draft 2020-12) for settings files. A file with `command` may have only keys of that command."""
    tables: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for settings in commands.values():
        for setting in settings:
            tables[setting.section].setdefault(setting.key, _value_schema(setting))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Settings of llama-adapter",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "command": {"enum": list(commands)},
            **{section: _table_schema(table) for section, table in tables.items()},
        },
        "allOf": [
            {
                "if": {"properties": {"command": {"const": name}}, "required": ["command"]},
                "then": {
                    "properties": {
                        section: {
                            "propertyNames": {"enum": [one.key for one in settings if one.section == section]},
                        }
                        for section in SECTIONS
                    }
                },
            }
            for name, settings in commands.items()
        ],
    }


def _table_schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": ["object", "null"], "additionalProperties": False, "properties": dict(properties)}


def _value_schema(setting: Setting) -> dict[str, Any]:
    item: dict[str, Any] = {"type": "boolean" if setting.is_switch else _TYPES.get(setting.parse, "string")}
    if setting.choices:
        item = {"enum": list(dict.fromkeys((*setting.choices, *([setting.default] if setting.default else []))))}
    elif item["type"] == "string" and setting.parse is not str:
        item = {"type": ["string", "number"]}  # a text in a special format, such as 8 or auto
    forms = [item, {"type": "null"}]
    if setting.is_list or setting.separator:
        forms.append({"type": "array", "items": {"type": ["string", "number"]}})
    return {"description": setting.help, "anyOf": forms}
