"""Tables that explain the output of failed vendor programs: a pattern, its meaning, and what to do."""

import re
from collections.abc import Iterable
from typing import NamedTuple


class Explanation(NamedTuple):
    """The meaning of an output that matches `pattern`, and what to do. Both texts may have fields for `str.format`."""

    pattern: str  # a regular expression that ignores case
    sentence: str
    hint: str


def first_that_fits(table: Iterable[Explanation], output: str) -> tuple[Explanation, re.Match[str]] | None:
    """The first entry whose pattern occurs in `output`, and its match; None if no pattern occurs."""
    found = ((entry, re.search(entry.pattern, output, re.IGNORECASE)) for entry in table)
    return next(((entry, match) for entry, match in found if match), None)
