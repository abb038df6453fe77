"""Files of records: a JSON object in each line, which begins with `id`.

Lines that are not records may be torn by a crash, or be something else.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

from llama_adapter.runtime.errors import LlamaAdapterError

PART_NAME: Final = re.compile(r"part-(\d{5,})\.jsonl")  # a file in a folder of records

# Larger than any record: prompts and choices come from lines of at most 1 MiB, and escaping turns one byte into at most
# six.
MAX_RECORD_BYTES: Final = 2**24

# The types of the fields that every answer has.
FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    **dict.fromkeys(("id", "picture", "prompt", "text", "finish", "run"), (str,)),
    **dict.fromkeys(("choice", "error"), (dict, type(None))),
    "tokens": (int,),
    "ms": (dict,),
}

# Fields that other programs, such as pandas, write as 1.0 if some records lack them.
_INTEGERS: Final = ("tokens", "number", "row")
_TRUTHS: Final = ("unfamiliar", "transparent", "damaged")

_BEGINNING: Final = b'{"id": "'
# Quotes within strings are escaped, so this matches only at the beginning of a record.
_RECORD: Final = re.compile(rb'\{\s*"id"\s*:\s*"')
_NOT_A_RECORD: Final = f"is not a record, a JSON object in UTF-8 with {', '.join(FIELDS)}"

_Parsed = TypeVar("_Parsed")


class RecordFileError(LlamaAdapterError):
    """A file is not a file of records, or its manifest is not a manifest."""


def read_lines(path: str | os.PathLike[str], parse: Callable[[bytes], _Parsed | None]) -> Iterator[tuple[int, _Parsed]]:
    """The parsed lines of a file, each with its byte offset; empty lines and a torn last line are skipped.

    Raises `RecordFileError`, which names the first line for which `parse` returns None, and OSError.
    """
    offset = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            is_whole = line.endswith(b"\n")
            parsed = parse(line if is_whole else without_zeros(line))
            if parsed is not None:
                yield offset, parsed
            elif not line.isspace() and (is_whole or not is_torn(line)):  # editors and joined files leave empty lines
                raise no_records(path, where=f"line {number}", line=line)
            offset += len(line)


def parse_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line; None for anything else. Integers and truth values that became 1.0 are as they were."""
    try:
        value = json.loads(line.decode("utf-8-sig", "surrogatepass"))  # json.loads would accept UTF-16 as well
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    for kind, names in ((int, _INTEGERS), (bool, _TRUTHS)):
        for name in names:
            number = value.get(name)
            if isinstance(number, float) and number.is_integer() and kind(number) == number:
                value[name] = kind(number)
    return value


def no_records(path: str | os.PathLike[str], *, where: str, line: bytes = b"") -> RecordFileError:
    """The error for a file with other content. `line` is the content at `where`, if known."""
    fault, advice = _NOT_A_RECORD, "name another file, or move this one away"
    if len(_RECORD.findall(line)) > 1 and parse_object(line) is None:
        fault, jq = "holds several records", "`jq -c 'arrays[], objects' FILE > NEW_FILE`"
        advice = f"{jq} writes one in each line; if jq fails, one is damaged: name another file"
    return RecordFileError(
        f"Wanted a file of answers (JSON lines) at `{os.fspath(path)}`, but {where} {fault}; {advice}."
    )


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
    return is_one and len(begun) <= MAX_RECORD_BYTES and not _begins_with_an_object(begun)


def is_begun(line: bytes) -> bool:
    """Whether a first line without a line feed is the beginning of a record."""
    begun = line[: len(_BEGINNING)]
    return bool(begun) and _BEGINNING.startswith(begun) and is_torn(line)


def _begins_with_an_object(line: bytes) -> bool:
    try:
        json.JSONDecoder().raw_decode(line.decode(errors="surrogateescape"))
    except (ValueError, RecursionError):
        return False
    return line.startswith(b"{")
