"""The entry of the tables that explain foreign programs' failures. The tables are with what runs those programs."""

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """What words with `pattern` in them mean, and what to do; either text may have holes for `str.format`."""

    pattern: re.Pattern[str]
    sentence: str
    hint: str


def explanation(pattern: str, sentence: str, hint: str) -> Explanation:
    """An `Explanation` that does not mind upper and lower case."""
    return Explanation(pattern=re.compile(pattern, re.IGNORECASE), sentence=sentence, hint=hint)


def first_that_fits(table: Iterable[Explanation], words: str) -> tuple[Explanation, re.Match[str]] | None:
    """The first entry whose pattern is in `words`, and where; None when there is none."""
    for entry in table:
        if found := entry.pattern.search(words):
            return entry, found
    return None
