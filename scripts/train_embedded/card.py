"""Puts results into docs/embedded-model.json, renders docs/embedded-model.md, and plots curves beside it.

Usage: python -m scripts.train_embedded.card [--scores NAME=FILE ...] [--familiar FILE] [--run FOLDER] [--out FOLDER]

`--scores` adds a result of `scripts.train_embedded.score --json FILE`; NAME is float32 or int8. `--familiar` adds a
result of `scripts.train_embedded.familiar_score --json FILE`. `--run` adds the curves of a training. Other results
stay.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.common import add_out, parser_of
from scripts.pages import render
from scripts.train_embedded.curves import collect, draw

PAGE = "embedded-model"
TYPES = ("float32", "int8")


def add_scores(figures: dict[str, Any], name: str, result: Mapping[str, Any]) -> None:
    """Put a result of score.py under `name`: float32 or int8.

    Raises ValueError for other names, and if float32 and int8 were scored on different questions.
    """
    if name not in TYPES:
        raise ValueError(f"--scores takes {' or '.join(TYPES)}, got `{name}`")
    known = figures["scores"]
    for other in {*known} - {name}:
        if any(known[other][key] != result[key] for key in ("seed", "asked")):
            raise ValueError(f"{name} and {other} were not asked the same questions: score both with the same flags")
    known[name] = result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--scores", action="append", default=[], metavar="NAME=FILE", help="result of score.py --json")
    parser.add_argument("--familiar", type=Path, metavar="FILE", help="result of familiar_score.py --json")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="folder of a training, with its NAME.curve.jsonl")
    add_out(parser, PAGE)
    options = parser.parse_args(arguments)
    figures = render.read(PAGE, options.out)
    try:
        for given in options.scores:
            name, _, file = given.partition("=")
            add_scores(figures, name, json.loads(Path(file).read_text(encoding="utf-8")))
        if options.familiar is not None:
            figures["familiar"] = json.loads(options.familiar.read_text(encoding="utf-8"))
        if options.run is not None:
            for part, found in collect(options.run).items():
                figures[part] |= found
            draw(figures["curves"], options.out / "embedded-curves.png")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    render.save(PAGE, figures, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
