"""Makes text from files and other programs safe for a terminal, a log or a Markdown file."""

import os
import re
from typing import Final, TypeVar

Value = TypeVar("Value")

# Characters that a terminal interprets or that break a line: control characters, line and paragraph separators, marks
# of the reading direction, and lone surrogates, which UTF-8 cannot encode. Other spaces, joiners and unassigned
# characters are common in file names and are kept.
UNSAFE_ON_TERMINALS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# What Markdown interprets, also its dialects with tables, links of bare addresses, emoji and formulas. Marks of lists
# and rulers count only at the beginning. The last character of a match is the one to escape.
_MARKUP: Final = re.compile(r"[\\`*_\[\]<>|#&~$@]|:(?=\S)|www\.|^[-+](?!\d)|^\d{1,9}[.)](?!\S)", re.IGNORECASE)


def shown_name(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> str:
    """A file's name as one line for a terminal or a log. Two names may look the same.

    A byte that is not UTF-8 is shown as an escape such as `\\xff`, and so are the characters of `UNSAFE_ON_TERMINALS`.
    """
    name = os.fspath(path)
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:  # a lone surrogate that does not stand for a byte, so this is not a file's name
        encoded = str(name).encode(errors="backslashreplace")
    return shown_text(encoded.decode(errors="backslashreplace"))


def plain_text(value: Value) -> Value:
    """A text without its own class: of an enum's member, the value, while formatting gives the name.

    Other values are returned unchanged.
    """
    return str.__str__(value) if isinstance(value, str) else value  # type: ignore[return-value]


def one_line(text: str) -> str:
    """The lines of a text on one line, without white space around them and without empty lines."""
    return " ".join(filter(None, map(str.strip, text.splitlines())))


def counted(number: int, noun: str, *, plural: str | None = None) -> str:
    """A number and its noun, in the plural if needed, by default with an s: `1 picture`, `2,000 pictures`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def shown_excerpt(text: str, *, length: int = 200) -> str:
    """As `shown_text`, for text of any length, such as that of a file: at most `length` of its characters."""
    return shown_text(text if len(text) <= length else text[:length] + "...")


def shown_text(text: str) -> str:
    """Text for a terminal or a log, on one line: the characters of `UNSAFE_ON_TERMINALS` become escapes."""
    return UNSAFE_ON_TERMINALS.sub(lambda unsafe: unsafe[0].encode("unicode_escape").decode(), text)


def markdown_text(text: str) -> str:
    """The text as `shown_text` gives it, in Markdown: no part of it is markup in a paragraph, a list or a table."""
    return _MARKUP.sub(lambda mark: f"{mark[0][:-1]}\\{mark[0][-1]}", shown_text(text).strip(" "))
