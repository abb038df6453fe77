"""Reads and updates the figures of the embedded model, which are in one JSON file."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from llama_adapter.runtime.atomic_write import atomic_write
from scripts.common import DOCS
from scripts.pages.render import as_text

PLACE = DOCS / "embedded-model.json"


def read(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises OSError, and ValueError if the file holds anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a JSON object")
    return content


def put(path: Path, *keys: str, value: object) -> None:
    """Set `value` under nested `keys` of the object in `path`. The file is created if missing.

    Raises OSError and ValueError.
    """
    content = read(path) if path.exists() else {}
    inner = content
    for name in keys[:-1]:
        inner = inner.setdefault(name, {})
    inner[keys[-1]] = value
    with atomic_write(path) as file:
        file.write((as_text(content) + "\n").encode())


def table(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table for the terminal."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (heads, ["---"] * len(heads), *rows))
