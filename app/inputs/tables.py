"""JSONL, CSV and TSV files as rows of named values."""

import csv
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from llama_adapter.app.inputs.items import InputsError
from llama_adapter.app.inputs.lines import MAX_LINE_BYTES, ByteFile, opened_lines, read_beginning, split_lines
from llama_adapter.runtime.text import shown_name

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON_SUFFIXES = (".jsonl", ".ndjson")
TABLE_SUFFIXES = (*_JSON_SUFFIXES, *_DELIMITERS)
_TOO_LONG = "\ud800"  # replaces a CSV line above the limit; this character never occurs in decoded bytes
_TOO_LONG_REASON = f"it has more than {MAX_LINE_BYTES:,} bytes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of a table. A malformed row has a `problem`, the reason in words, and no values."""

    line: int  # the line in which the row begins, counted from 1
    values: Mapping[str, object] = field(default_factory=dict)
    problem: str = ""


def read_rows(path: str, *, what: str, keep_bytes: bool = False) -> Iterator[Row]:
    """The rows of a table in UTF-8, as they are read; blank lines are skipped.

    The suffix decides the format. A `.jsonl` (or `.ndjson`) file has an object in each line. A `.csv` or `.tsv` file
    begins with a row of column names; columns without a name are ignored, and cells may be quoted and contain line
    feeds. A `.csv` file whose first line has tabs and no commas is read as a `.tsv` file. A row has a problem if it is
    not a JSON object, has another number of cells than the first row, is not UTF-8 or is above 1 MiB. With
    `keep_bytes`, bytes of cells that are not UTF-8 are kept as surrogates.

    Raises `InputsError`, whose message uses the word `what` for the file, for another suffix, and if the file cannot be
    opened, is UTF-16 or has no first row of distinct column names.
    """
    check_suffix(path, what=what)
    with opened_lines(path, what=what) as file:
        begun = read_beginning(file, path=path, what=what)
        delimiter = _DELIMITERS.get(_suffix(path))
        head = begun.split(b"\n", 1)[0]
        if delimiter == "," and b"\t" in head and b"," not in head:
            delimiter = "\t"  # the image-text lists of LLaMA-Adapter's pre-training are called .csv
        yield from (
            _json_rows(file, begun=begun)
            if delimiter is None
            else _cell_rows(file, begun=begun, delimiter=delimiter, path=path, what=what, keep_bytes=keep_bytes)
        )


def check_suffix(path: str, *, what: str) -> None:
    """Raise `InputsError` if a file's suffix is not that of a table."""
    if _suffix(path) not in TABLE_SUFFIXES:
        raise InputsError(
            f"Wanted a {what} that is called .jsonl, .csv or .tsv, got `{shown_name(path)}`.",
            hint="its suffix says how it is read: rename or convert it",
        )


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _json_rows(file: ByteFile, *, begun: bytes) -> Iterator[Row]:
    for number, line in split_lines(file, begun=begun):
        if line is None:
            yield Row(line=number, problem=_TOO_LONG_REASON)
        elif line.strip():
            yield _json_row(line, number=number)


def _json_row(line: bytes, *, number: int) -> Row:
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError:
        return Row(line=number, problem="it is not UTF-8")
    except json.JSONDecodeError as error:
        return Row(line=number, problem=f"it is not valid JSON from column {error.colno} on")
    except (ValueError, RecursionError):  # a number of thousands of digits, thousands of brackets
        return Row(line=number, problem="it is not valid JSON")
    if not isinstance(values, dict):
        return Row(line=number, problem="it is not a JSON object")
    return Row(line=number, values=values)


def _cell_rows(
    file: ByteFile, *, begun: bytes, delimiter: str, path: str, what: str, keep_bytes: bool
) -> Iterator[Row]:
    lines = (
        _TOO_LONG if line is None else line.decode(errors="surrogateescape") + "\n"
        for _, line in split_lines(file, begun=begun)
    )
    records = _records(csv.reader(lines, delimiter=delimiter, strict=True), keep_bytes=keep_bytes)
    _, head, problem = next(records, (1, [], "it is empty"))
    names = [name.strip() for name in head]
    named = [name for name in names if name]
    problem = problem or ("two of its columns have the same name" if len(set(named)) < len(named) else "")
    if problem:
        raise InputsError(
            f"Wanted a {what} with the names of its columns in the first line of `{shown_name(path)}`, but {problem}.",
            hint="give every column a different name, and use the delimiter that the suffix implies",
        )
    for line, cells, reason in records:
        if not reason and len(cells) != len(names):
            reason = f"it has {len(cells)} cells, and the first line has {len(names)}"
        if reason:
            yield Row(line=line, problem=reason)
        else:
            yield Row(line=line, values={name: cell for name, cell in zip(names, cells, strict=True) if name})


class _Reader(Protocol):
    line_num: int

    def __next__(self) -> list[str]: ...


def _records(reader: _Reader, *, keep_bytes: bool) -> Iterator[tuple[int, list[str], str]]:
    """Line, cells and problem of every row. After a malformed row, reading continues at the next line.

    If a quote is not closed or not doubled, the problem names the lines that it swallowed, because each may name a
    picture.
    """
    while True:
        line, cells, problem = reader.line_num + 1, list[str](), ""
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            # Escaped like a name, because the message quotes the delimiter, which may be a tab.
            problem = f"it is not valid CSV ({shown_name(str(error))})"
            if reader.line_num > line:
                problem += f" and swallows the lines up to {reader.line_num:,}: a quote is not closed or not doubled"
        text = "".join(cells)
        if _TOO_LONG in text:
            problem = _TOO_LONG_REASON
        elif not keep_bytes and any("\udc80" <= character <= "\udcff" for character in text):
            problem = "it is not UTF-8"
        if cells or problem:
            yield line, cells, problem
