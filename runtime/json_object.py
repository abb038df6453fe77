"""Reads and checks JSON objects from files that may have been edited by hand."""

import json
from collections.abc import Mapping
from typing import Any, Final

from llama_adapter.runtime.text import shown_excerpt

_KINDS: Final[Mapping[type, str]] = {
    bool: "true or false",
    dict: "an object",
    float: "a number",
    int: "a whole number",
    list: "a list",
    str: "a text",
    type(None): "null",
}


def read_object(text: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises ValueError for any other text."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON (line {error.lineno}, column {error.colno})") from None
    except (RecursionError, ValueError):
        raise ValueError("it is JSON nested too deep, or with a number too long") from None
    if type(found) is not dict:
        raise ValueError(f"it is {told_kind(found)}, where an object is wanted")
    return found


def check_fields(values: Any, fields: Mapping[str, type | tuple[type, ...]], *, what: str) -> None:
    """Raise ValueError unless `values`, called `what`, is an object of exactly these fields of exactly these types."""
    if type(values) is not dict:
        raise ValueError(f"{what} must be an object, and is {told_kind(values)}")
    missing, unknown = [name for name in fields if name not in values], [name for name in values if name not in fields]
    if missing:
        raise ValueError(f"{what} has no {', '.join(missing)}")
    if unknown:
        raise ValueError(f"{what} has unknown fields: {', '.join(map(ascii, unknown))}")
    for name, wanted in fields.items():
        kinds = wanted if isinstance(wanted, tuple) else (wanted,)
        if type(values[name]) not in kinds:
            told = " or ".join(_KINDS[kind] for kind in kinds)
            raise ValueError(f"{shown_excerpt(name)} of {what} must be {told}, and is {told_kind(values[name])}")


def check_mapping(values: Any, kind: type, *, what: str) -> None:
    """Raise ValueError unless `values`, called `what`, is an object whose fields have any names and this type."""
    check_fields(values, dict.fromkeys(values, kind) if type(values) is dict else {}, what=what)


def take_version(values: dict[str, Any], known: int) -> None:
    """Remove `version` from `values`. Raise ValueError unless it equals `known`."""
    version = values.pop("version", None)
    if version is None:
        raise ValueError("it has no version")
    if type(version) is not int or version != known:
        raise ValueError(f"its version is {shown_excerpt(repr(version))}, and this program reads {known}")


def told_kind(value: Any) -> str:
    """The type of a JSON value for messages, such as `a text` or `null`."""
    return _KINDS[type(value)]
