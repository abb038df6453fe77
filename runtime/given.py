"""Checks values that users give as settings, and makes them plain. All raise ValueError, which names the setting."""

import json
import operator
from collections.abc import Collection, Iterable
from numbers import Integral, Real
from typing import Any


def whole_number(name: str, value: Any, *, least: int | None = None) -> int:
    """Any integer, such as numpy's, as an int of at least `least`. A bool is none."""
    wanted = "a whole number" if least is None else f"a whole number of at least {least}"
    is_whole = hasattr(value, "__index__") and not (isinstance(value, bool) or getattr(value, "shape", None))
    if not is_whole or (least is not None and operator.index(value) < least):
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
    return operator.index(value)


def real_number(name: str, value: Any) -> float:
    """Any real number, such as numpy's, as an int or a float. A bool is none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return int(value) if isinstance(value, Integral) else float(value)


def texts(name: str, value: Any) -> tuple[str, ...]:
    """One text or several as a tuple. An empty text is none."""
    several = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(text, str) and text for text in several):
        raise ValueError(f"{name} must be texts that are not empty, got {value!r}")
    return several


def require_one_of(name: str, value: str | None, known: Collection[str | None]) -> None:
    """One of the `known` texts; None among them is not named in the message."""
    if value not in known:
        raise ValueError(f"{name} must be {' or '.join(filter(None, known))}, got {value!r}")


def require_least(settings: object, *names: str, least: int = 1) -> None:
    """The fields `names` of `settings` are at least `least`, or None."""
    for name in names:
        if (value := getattr(settings, name)) is not None and not value >= least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def require_above_zero(settings: object, *names: str) -> None:
    """The fields `names` of `settings` are above 0."""
    for name in names:
        if not (value := getattr(settings, name)) > 0:
            raise ValueError(f"{name} must be above 0, got {value}")


def require_named(settings: object, *names: str, hint: str) -> None:
    """The fields `names` of `settings`, which are paths or None, are no empty texts."""
    for name in names:
        if getattr(settings, name) == "":
            raise ValueError(f"{name} is empty: {hint}")


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
