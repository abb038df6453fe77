"""Renders pages of docs/ from their figures: docs/NAME.json and scripts/pages/NAME.md.jinja make docs/NAME.md.

A page without a template has that of its first words: peers.md.jinja also makes docs/peers-zen4.md.

Usage: python -m scripts.pages.render [NAME ...]
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from llama_adapter.runtime.atomic_write import atomic_write
from scripts.common import DOCS

TEMPLATES = Path(__file__).parent
PAGES = tuple(sorted(path.stem for path in DOCS.glob("*.json")))


def render(name: str, figures: Any) -> str:
    """The page `name` of `figures`, the content of its JSON file. Raises jinja2.UndefinedError for a missing figure."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"f": _number, "cell": _cell}
    page = environment.get_template(template_of(name)).render(_context(name, figures))
    return re.sub(r"\n{3,}", "\n\n", page).strip("\n") + "\n"


def template_of(name: str) -> str:
    """The template of a page, a file in `TEMPLATES`."""
    while not (TEMPLATES / f"{name}.md.jinja").is_file() and "-" in name:
        name = name.rpartition("-")[0]
    return f"{name}.md.jinja"


def read(name: str, folder: Path = DOCS) -> Any:
    """The figures of a page."""
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def save(name: str, figures: Any, folder: Path = DOCS) -> None:
    """Write the figures and their page into `folder`."""
    with atomic_write(folder / f"{name}.json") as file:
        file.write((as_text(figures) + "\n").encode())
    write(name, figures, folder)


def as_text(value: object, indent: str = "") -> str:
    """JSON with one line for each list of plain values, and for each entry of other lists."""
    inner = indent + " "
    if isinstance(value, Mapping) and value:
        entries = (f"{inner}{json.dumps(key)}: {as_text(each, inner)}" for key, each in value.items())
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(each, (list, Mapping)) for each in value):
        return "[\n" + ",\n".join(inner + json.dumps(each, allow_nan=False) for each in value) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)


def write(name: str, figures: Any, folder: Path = DOCS) -> None:
    """Write the page of `figures` into `folder`."""
    (folder / f"{name}.md").write_text(render(name, figures), encoding="utf-8")


def _context(name: str, figures: Any) -> dict[str, Any]:
    """The variables of the template: the figures, and what pages of peers compute from them."""
    if name.startswith("peers"):
        from scripts.peers.report import page_context

        return page_context(figures)
    return {**figures, "page": name}


def _number(value: object, spec: str, unit: str = "") -> str:
    """`value` by a Python format specification; None is a dash."""
    str(value)  # raises UndefinedError for a missing figure
    return "-" if value is None else f"{value:{spec}}{unit}"


def _cell(value: object) -> str:
    """A value in a table; a float as short as it can be."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text.replace("|", r"\|")


def main(names: Sequence[str]) -> None:
    for name in names or PAGES:
        write(name, read(name))


if __name__ == "__main__":
    main(sys.argv[1:])
