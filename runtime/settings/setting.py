"""One setting of a command: its key in files, its environment variable, and how its text becomes a value."""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SECTIONS = (
    "model",
    "prompt",
    "generation",
    "computation",
    "training",
    "parallel",
    "input",
    "output",
    "server",
    "page",
    "profiling",
)
PREFIX = "LLAMA_ADAPTER_"

_WANTED: Mapping[Any, str] = {int: "a whole number", float: "a number"}
_SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

Given = str | list[str]  # the text of a value, or of each of its items


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A value that a flag, an environment variable or a key of a file sets. It is made from the flag's declaration."""

    section: str
    key: str
    dest: str  # its name among the values that a command receives
    shown: str  # its name on the command line, such as `--batch-size` or `PICTURES`
    help: str
    default: Any
    parse: Callable[[str], Any]  # raises ValueError, TypeError or ArgumentTypeError
    choices: tuple[Any, ...]  # allowed values; empty: any value
    flags: Mapping[Any, str]  # flag by value, for flags without an argument; empty: the flag takes an argument
    is_list: bool
    separator: str | None  # between the items of a text; files may give a list instead
    is_required: bool

    @property
    def is_switch(self) -> bool:
        """Whether the setting is either on or off."""
        return bool(self.flags) and not self.choices

    @property
    def variable(self) -> str:
        """The name of its environment variable."""
        return PREFIX + self.key.upper()

    def read(self, given: Given) -> Any:
        """The value of a text, or of the texts of a list. Raises ValueError, which says what was expected."""
        if self.is_list:
            return [self._value(text) for text in ([given] if isinstance(given, str) else given)]
        if isinstance(given, list):
            if self.separator is None:
                raise ValueError("wanted one value, got a list")
            return self._value(self._joined(given, self.separator))
        return self._value(given)

    def _joined(self, given: list[str], separator: str) -> str:
        """A list as one text: joined by `separator`, or as JSON if an item contains it. Other parsers refuse JSON."""
        is_plain = not any(separator in text or text.startswith("[") for text in given)
        return separator.join(given) if is_plain else json.dumps(given, ensure_ascii=False)

    def _value(self, text: str) -> Any:
        if self.is_switch:
            if text.lower() not in _SWITCH:
                raise ValueError(f"wanted true or false, got {text!r}")
            return _SWITCH[text.lower()]
        try:
            value = self.parse(text)
        except argparse.ArgumentTypeError as error:
            raise ValueError(str(error)) from None
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"wanted {_WANTED[self.parse]}, got {text!r}" if self.parse in _WANTED else str(error)
            ) from None
        if self.choices and value not in (*self.choices, self.default):
            raise ValueError(f"wanted {' or '.join(map(str, self.choices))}, got {text!r}")
        return value


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.7) -> str | None:
    """The most similar known name; None if no name is similar enough."""
    import difflib

    found = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def meant(name: str | None, known: Iterable[str], *, cutoff: float = 0.7) -> str:
    """A hint with the most similar known name; "" if no name is similar enough."""
    similar = nearest(name or "", known, cutoff=cutoff)
    return f"`{similar}` may be meant" if similar else ""
