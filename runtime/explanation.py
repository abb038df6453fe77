"""Entries of the tables that explain failures of foreign programs. Each table is beside the code that runs them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """The meaning of a text that `pattern` matches, and a hint. Both may have fields for `str.format`."""

    pattern: re.Pattern[str]
    sentence: str
    hint: str


def explanation(pattern: str, sentence: str, hint: str) -> Explanation:
    """An `Explanation` that ignores case."""
    return Explanation(pattern=re.compile(pattern, re.IGNORECASE), sentence=sentence, hint=hint)


def first_that_fits(table: Iterable[Explanation], words: str) -> tuple[Explanation, re.Match[str]] | None:
    """The first entry whose pattern matches in `words`, with the match; None if there is none."""
    for entry in table:
        if found := entry.pattern.search(words):
            return entry, found
    return None
