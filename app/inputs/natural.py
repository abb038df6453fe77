"""The order of names as people count them: pic_2 before pic_10."""

import re

_RUNS = re.compile(r"[0-9]+|[^0-9]+")


def natural_key(name: str) -> str:
    """Sort key that compares runs of digits as numbers and letters without case; the name itself breaks ties.

    One string, since a folder may have millions of names. A number is written as its length and its digits, behind a
    null character, which is below everything that a name may hold; two of those end the name.
    """
    return f"{_RUNS.sub(_comparable, name)}\0\0{name}"


def _comparable(run: re.Match[str]) -> str:
    text = run[0]
    if text[0] not in "0123456789":
        return text.casefold()
    digits = text.lstrip("0")
    return f"\0{chr(len(digits) + 1)}{digits}"
