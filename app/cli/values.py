"""Texts of a command line -> values, or the reason why not. Knows no flags."""

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.errors import UsageError

T = TypeVar("T")


def parse_text(text: str) -> str:
    """Text for the model; raises UsageError when the locale could not read it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"Wanted text in the encoding of this locale, {sys.getfilesystemencoding()}, but character "
            f"{error.start + 1} of {text!a} is none of it",
            hint="write UTF-8, in a UTF-8 locale: LC_ALL=C.UTF-8",
        ) from error
    return text


def parse_choices(text: str) -> tuple[str, ...]:
    """`Yes, No` -> ("Yes", "No"); raises ArgumentTypeError for fewer than two, empty or equal ones."""
    choices = tuple(choice.strip() for choice in parse_text(text).split(","))
    if len(choices) < 2 or not all(choices) or len(set(choices)) < len(choices):
        raise argparse.ArgumentTypeError(f"wanted at least two different answers with commas between, got {text!r}")
    return choices


def parse_band(text: str) -> tuple[float, float]:
    """`0.3,0.7` -> (0.3, 0.7); raises ArgumentTypeError for anything else than two numbers."""
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted two probabilities such as 0.3,0.7, got {text!r}") from None
    return low, high


def parse_shard(text: str) -> tuple[int, int]:
    """`0/4` -> (0, 4); raises ArgumentTypeError unless the first is below the second, counted from 0."""
    part, _, parts = text.partition("/")
    try:
        shard = int(part), int(parts)
    except ValueError:
        shard = (0, 0)
    if not 0 <= shard[0] < shard[1]:
        raise argparse.ArgumentTypeError(f"wanted I/N with I counted from 0, such as 0/4 to 3/4, got {text!r}")
    return shard


def parse_batch_sizes(text: str) -> tuple[int, ...]:
    """`1,2,4` -> (1, 2, 4); raises ArgumentTypeError for anything else than whole numbers above 0."""
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        sizes = (0,)
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"wanted whole numbers of at least 1 with commas between, got {text!r}")
    return sizes


def spec_from(options: argparse.Namespace) -> CaptionerSpec:
    """The spec that the flags describe; raises UsageError when they exclude each other."""
    return settings(CaptionerSpec, vars(options))


def settings(kind: Callable[..., T], values: Mapping[str, Any], *, shown: Mapping[str, str] | None = None) -> T:
    """The dataclass `kind` of those values that it has fields for.

    Raises UsageError for values it refuses, in the user's words: a field is the flag of its name, or as in `shown`.
    """
    fields = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    words = {name: "--" + name.replace("_", "-") for name in fields} | dict(shown or {})
    try:
        return kind(**{name: values[name] for name in fields if name in values})
    except ValueError as error:
        told = re.sub(rf"(?<![\w-])({'|'.join(fields)})\b", lambda match: words[match[0]], str(error))
        raise UsageError(told) from error
