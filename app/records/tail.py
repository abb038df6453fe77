"""Examines lines that are not records: they may be torn by a crash, or be something else."""

import json
import re
from typing import Final

# Larger than any record: prompts and choices come from lines of at most 1 MiB, and escaping turns one byte into at most
# six.
MAX_RECORD_BYTES: Final = 2**24

_BEGINNING: Final = b'{"id": "'
# Quotes within strings are escaped, so this matches only at the beginning of a record.
_RECORD: Final = re.compile(rb'\{\s*"id"\s*:\s*"')
_NOT_A_RECORD: Final = ("is not a record", "name another file, or move this one away")
_SEVERAL_VALUES: Final = "`jq -c . FILE > NEW_FILE` writes one in each line"


def without_zeros(tail: bytes) -> bytes:
    """The end of a file, without the zeros that unwritten bytes become after a power cut."""
    return tail.rstrip(b"\0")


def is_torn(tail: bytes) -> bool:
    """Whether the bytes after the last line feed are the beginning of a single record, or only zeros.

    Such bytes can be cut off without loss. A complete JSON value, or the beginnings of two records, mean that line
    feeds were lost.
    """
    begun = without_zeros(tail)
    if not begun:
        return True
    is_one = begun.startswith(b"{") and _RECORD.search(begun, 1) is None
    return is_one and len(begun) <= MAX_RECORD_BYTES and _end_of_first_value(begun) is None


def is_begun(line: bytes) -> bool:
    """Whether a first line without a line feed is the beginning of a record."""
    begun = line[: len(_BEGINNING)]
    return bool(begun) and _BEGINNING.startswith(begun) and is_torn(line)


def fault_in(line: bytes) -> tuple[str, str]:
    """What is wrong with a line that is not a record, and what to do about it."""
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "is in UTF-16", "save it in UTF-8"
    if line.startswith(b"\x1f\x8b"):
        return "is compressed by gzip", "unpack it"
    if len(line) > MAX_RECORD_BYTES:
        return f"has more than {MAX_RECORD_BYTES:,} bytes, so that its line feeds must be lost", _SEVERAL_VALUES
    end = _end_of_first_value(line)
    if end is None or not line[end:].strip():
        several = len(_RECORD.findall(line)) > 1
        return ("holds several records, and one of them is damaged", _NOT_A_RECORD[1]) if several else _NOT_A_RECORD
    if not line[end:].lstrip().startswith(b"{"):
        return _NOT_A_RECORD
    by_returns = line[end:].startswith(b"\r")
    what = "holds several records, divided by carriage returns alone" if by_returns else "holds several records"
    return f"{what}: their line feeds are lost", _SEVERAL_VALUES


def _end_of_first_value(line: bytes) -> int | None:
    """Offset after the JSON object at the beginning of a line; None if there is no complete object."""
    if not line.startswith(b"{"):
        return None
    text = line.decode(errors="surrogateescape")
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return len(text[:end].encode(errors="surrogateescape"))
