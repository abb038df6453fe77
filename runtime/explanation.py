"""Explains the output of failed vendor programs by explanations.toml: patterns, their meaning, and what to do."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Explanation(NamedTuple):
    """The meaning of an output that matches `pattern`, and what to do. Both texts may have fields for `str.format`."""

    pattern: str  # a regular expression that ignores case
    sentence: str
    hint: str


def read_explanations(program: str) -> Any:
    """The table of a program: a list of explanations, or explanations by name."""
    table = tomllib.loads(Path(__file__).with_name("explanations.toml").read_text(encoding="utf-8"))[program]
    if isinstance(table, list):
        return [Explanation(**entry) for entry in table]
    return {name: Explanation(**entry) for name, entry in table.items()}


def first_that_fits(table: Iterable[Explanation], output: str) -> tuple[Explanation, re.Match[str]] | None:
    """The first entry whose pattern occurs in `output`, and its match; None if no pattern occurs."""
    found = ((entry, re.search(entry.pattern, output, re.IGNORECASE)) for entry in table)
    return next(((entry, match) for entry, match in found if match), None)
