"""Splits a text into choices."""

import json
from typing import Any


def split_choices(text: str) -> list[Any]:
    """The texts between the commas of `Yes, No`, or the items of a JSON list, which may contain commas.

    Raises ValueError for a text that begins with `[` and is not valid JSON.
    """
    if not text.lstrip().startswith("["):
        return text.split(",")
    try:
        items: list[Any] = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return items
