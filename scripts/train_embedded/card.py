"""Puts scores into docs/embedded-model.json, and renders docs/embedded-model.md.

Usage: python -m scripts.train_embedded.card [--scores NAME=FILE ...] [--familiar FILE] [--out FOLDER]

`--scores` adds a result of `scripts.train_embedded.score --json FILE`; NAME is float32 or int8. `--familiar` adds a
result of `scripts.train_embedded.familiar_score --json FILE`.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.common import add_out, parser_of
from scripts.pages import render
from scripts.train_embedded.results import put, read

TYPES = ("float32", "int8")


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
