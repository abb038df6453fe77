"""Tables that explain the output of failed vendor programs: patterns, what they mean, what to do."""

import re
from collections.abc import Iterable
from typing import NamedTuple


class Explanation(NamedTuple):
    """What an output means that `pattern` occurs in, and what to do; both texts may have holes for `str.format`."""

    pattern: str  # upper and lower case are the same
    sentence: str
    hint: str


def first_that_fits(table: Iterable[Explanation], output: str) -> tuple[Explanation, re.Match[str]] | None:
    """The first entry whose pattern occurs in `output`, and where; None when there is none."""
    found = ((entry, re.search(entry.pattern, output, re.IGNORECASE)) for entry in table)
    return next(((entry, match) for entry, match in found if match), None)
