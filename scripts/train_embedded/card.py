"""Puts scores into docs/embedded-model.json, and renders docs/embedded-model.md.

Usage: python -m scripts.train_embedded.card [--scores NAME=FILE ...] [--familiar FILE] [--out FOLDER]

`--scores` adds a result of `scripts.train_embedded.score --json FILE`; NAME is float32 or int8. `--familiar` adds a
result of `scripts.train_embedded.familiar_score --json FILE`.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_adapter.runtime.atomic_write import atomic_write
from scripts.common import DOCS, add_out, parser_of
from scripts.pages import render

PLACE = DOCS / "embedded-model.json"
TYPES = ("float32", "int8")


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
        file.write((render.as_text(content) + "\n").encode())


def table(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table for the terminal."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (heads, ["---"] * len(heads), *rows))


def put_scores(path: Path, name: str, result: Mapping[str, Any]) -> None:
    """Put a result of score.py under `name`: float32 or int8.

    Raises ValueError for other names, and if float32 and int8 were scored on different questions.
    """
    if name not in TYPES:
        raise ValueError(f"--scores takes {' or '.join(TYPES)}, got `{name}`")
    known = read(path).get("scores", {}) if path.exists() else {}
    for other in {*known} - {name}:
        if any(known[other][key] != result[key] for key in ("seed", "asked")):
            raise ValueError(f"{name} and {other} were not asked the same questions: score both with the same flags")
    put(path, "scores", name, value=result)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--scores", action="append", default=[], metavar="NAME=FILE", help="result of score.py --json")
    parser.add_argument("--familiar", type=Path, metavar="FILE", help="result of familiar_score.py --json")
    add_out(parser, "embedded-model")
    options = parser.parse_args(arguments)
    figures = options.out / "embedded-model.json"
    try:
        for given in options.scores:
            name, _, file = given.partition("=")
            put_scores(figures, name, read(Path(file)))
        if options.familiar is not None:
            put(figures, "familiar", value=read(options.familiar))
        render.write("embedded-model", read(figures), options.out)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
