"""A text with several choices -> the choices."""

import json
from typing import Any


def split_choices(text: str) -> list[Any]:
    """What stands between the commas of `Yes, No`, or the items of a JSON list, whose texts may contain commas.

    Raises ValueError for a text that begins like a JSON list and is none.
    """
    if not text.lstrip().startswith("["):
        return text.split(",")
    try:
        items: list[Any] = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return items
