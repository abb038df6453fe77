"""The figures about the embedded model in one JSON file: read, updated, replaced whole. Measures nothing."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_adapter.runtime.atomic_write import atomic_write

DOCS = Path(__file__).resolve().parents[2] / "docs"
PLACE = DOCS / "embedded-model.json"


def read(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises OSError, and ValueError for what is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"Wanted JSON in {path}, and it cannot be read: {error}. Mend it, or measure again") from None
    if not isinstance(content, dict):
        raise ValueError(f"Wanted a JSON object in {path}, got a {type(content).__name__}. Mend it, or measure again")
    return content


def put(path: Path, key: str, *keys: str, value: object) -> None:
    """Set `value` under `key`, `keys` of the object in `path`, which is made where it is missing; all else stays.

    Raises OSError, and ValueError where something on the way is no object.
    """
    content = read(path) if path.exists() else {}
    *way, place = key, *keys
    inner, passed = content, [str(path)]
    for name in way:
        inner = inner.setdefault(name, {})
        passed.append(name)
        if not isinstance(inner, dict):
            raise ValueError(f"Wanted an object at {' / '.join(passed)}, got {json.dumps(inner)[:60]}. Take it out")
    inner[place] = value
    with atomic_write(path) as file:
        file.write((as_text(content) + "\n").encode())


def take(content: Mapping[str, Any], *keys: str) -> Any:
    """What stands under `keys`. Raises ValueError that names the first key that is missing."""
    found: Any = content
    for number, key in enumerate(keys, start=1):
        if not isinstance(found, Mapping) or key not in found:
            raise ValueError(
                f"The figures have no `{'.'.join(keys[:number])}`; the command that measures it puts it in"
            )
        found = found[key]
    return found


def as_text(value: object, indent: str = "") -> str:
    """JSON in which a list of plain values is one line, so that a series is, and so is each entry of another list."""
    inner = indent + " "
    if isinstance(value, Mapping) and value:
        entries = (f"{inner}{json.dumps(key)}: {as_text(each, inner)}" for key, each in value.items())
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(each, (list, Mapping)) for each in value):
        return "[\n" + ",\n".join(inner + json.dumps(each, allow_nan=False) for each in value) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)
