"""Shared code of scripts: parsers, progress on stderr, sample pictures."""

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

from llama_adapter.app.models.resources import sample_pictures

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
Tell = Callable[[str], None]


def tell(line: str) -> None:
    """Print progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def sample_files(count: int | None = None) -> list[Path]:
    """The sample pictures, by name: all of them, or `count`, repeated if there are too few."""
    files = sorted(path for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))
    return list(itertools.islice(itertools.cycle(files), len(files) if count is None else count))


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_out(parser: argparse.ArgumentParser, page: str) -> None:
    """`--out`, the folder of the results; None if it is not given."""
    parser.add_argument("--out", type=Path, help=f"folder of {page}.json and {page}.md (default: docs)")


def positive(kind: type[float]) -> Callable[[str], float]:
    """The type of an option that is a number above 0."""

    def number(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return number
