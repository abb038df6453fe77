"""The one reader of tables: CSV and TSV, JSON, lines of JSON and Parquet as rows of named values.

The content decides how a file is read, not its suffix. All commands use these rules, for pictures with and without
answers.
"""

import codecs
import csv
import json
import os
import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from llama_adapter.app.pictures.inputs.addresses import first_line
from llama_adapter.app.pictures.inputs.fields import (
    JSON,
    KNOWN_COLUMNS,
    PICTURE_COLUMNS,
    by_known_name,
    known_name,
    named,
)
from llama_adapter.app.pictures.inputs.items import InputsError, Row
from llama_adapter.app.pictures.inputs.json_sets import set_rows
from llama_adapter.app.pictures.inputs.lines import (
    TOO_LONG,
    ByteFile,
    can_read_again,
    check_lines,
    line_end,
    opened_lines,
    read_beginning,
    split_lines,
    unreadable,
)
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.extras import install_hint
from llama_adapter.runtime.text import shown_excerpt, shown_name

_SHOWN_SUFFIXES = ".csv, .tsv, .json, .jsonl or .parquet"
_LINE_SUFFIXES = (".jsonl", ".ndjson")
JSON_SUFFIXES = (*_LINE_SUFFIXES, ".json")
TABLE_SUFFIXES = (*JSON_SUFFIXES, ".csv", ".tsv", ".parquet")
_DELIMITERS = ",\t;|"
_SEPARATOR_LINE = re.compile(rb'"?sep=([\0-\x7f])"?\r?[\n\r]', re.IGNORECASE)  # of Excel, before the names
_MOST_WITHOUT = 1_000  # objects that are read to find a known column
_NO_OBJECT = "it is not a JSON object"
_LONG_LINE = "\ud800"  # replaces a CSV line above the limit; this character never occurs in decoded bytes
_ROWS_AT_ONCE = 256  # of Parquet; each may hold a picture
_SAVE_AGAIN = "save it as `CSV UTF-8`, or convert it from its encoding, such as: iconv -f CP1252 -t UTF-8 IN >OUT"


def read_rows(
    path: str, *, what: str, wanted: Sequence[str] = (), known: Collection[str] = KNOWN_COLUMNS, root: str | None = None
) -> Iterator[Row]:
    """The rows of a table, as they are read. A byte order mark shows UTF-16; other tables are UTF-8.

    A table that begins with `[` or `{` is JSON: a list of objects, an object in each line, or one of the sets of
    `json_sets`. Other tables begin with a row of column names. Its delimiter is the comma, tab, semicolon or bar that
    gives most `known` names, or that of a line `sep=;` before it. Lines end with LF, CRLF or CR. Cells may be quoted
    and contain line feeds. White space around names and cells is removed. Rows without values, empty cells at the end
    of a row and columns without a name are left out. A row has a problem if it is no object, has another number of
    cells than the first row, is above 1 MiB or begins the rows of a group of Parquet that cannot be read. Bytes of a
    name of a picture that are not UTF-8 are kept as surrogates. Pictures of sets are looked for in `root`, by default
    in the folder of the table.

    Raises `InputsError`, whose message uses the word `what` for the file: for another suffix; if the file cannot be
    opened, is not UTF-8, or has no first row of distinct column names; and if none of the columns `wanted` is in the
    first row, or in any object of a list.
    """
    check_suffix(path, what=what)
    root = os.path.dirname(path) if root is None else root
    table = _Table(path=path, what=what, wanted=wanted, known=known, root=root)
    if _suffix(path) == ".parquet":
        yield from _known_rows(parquet_rows(path, what=what), table)
        return
    with opened_lines(path, what=what) as file:
        begun = read_beginning(file, path=path, what=what)
        if _suffix(path) in JSON_SUFFIXES and not begun.strip():
            return
        if begun.lstrip()[:1] in (b"[", b"{"):
            yield from _known_rows(_json_rows(file, begun=begun, table=table), table)
        else:
            yield from _cell_rows(file, begun=begun, table=table)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Table:
    """A file and what is wanted of it; see `read_rows`."""

    path: str
    what: str
    wanted: Sequence[str]
    known: Collection[str]
    root: str

    def check_names(self, names: Sequence[str], *, where: str) -> None:
        """Raise `InputsError` if none of the columns `wanted` is among the names that are found `where`."""
        if self.wanted and set(names).isdisjoint(self.wanted):
            fault = "no known column" if set(names).isdisjoint(self.known) else "none of these"
            raise InputsError(
                f"Wanted a {self.what} with one of the columns {named(self.wanted)}, but {where} of "
                f"`{shown_name(self.path)}` names {fault}: it holds {shown_excerpt(', '.join(names))}.",
                hint="write the names of the columns into the first line; in JSON, use these names for the fields",
            )


def check_suffix(path: str, *, what: str) -> None:
    """Raise `InputsError` if a file's suffix is not that of a table."""
    if _suffix(path) not in (*TABLE_SUFFIXES, ".txt"):
        raise InputsError(
            f"Wanted a {what} that is called {_SHOWN_SUFFIXES}, got `{shown_name(path)}`.",
            hint="save or export it as one of these; rename it if it is one already",
        )


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _known_rows(rows: Iterator[Row], table: _Table) -> Iterator[Row]:
    """The rows with known names in lower case. Raises `InputsError` if the first objects have no column `wanted`."""
    wanted, known = table.wanted, table.known
    has_wanted, without = not wanted, list[Row]()  # the rows before the first with a column that is wanted
    for row in rows:
        own = {name: value for name, value in row.values.items() if known_name(name, known) == name}
        row = replace(row, values=by_known_name(row.values, known) | own)
        has_wanted = has_wanted or not row.values.keys().isdisjoint(wanted)
        if not has_wanted:
            without.append(row)
            if len(without) < _MOST_WITHOUT or not row.values:
                continue
            break
        yield from without
        without.clear()
        yield row
    if first := next((row for row in without if row.values), None):
        table.check_names(list(first.values), where=f"the object in line {first.line:,}")
    yield from without


def _json_rows(file: ByteFile, *, begun: bytes, table: _Table) -> Iterator[Row]:
    """Lines of objects are read one by one; all other JSON is read as a whole."""
    path, what = table.path, table.what
    end = line_end(begun)
    first = begun.strip().split(end, 1)[0].strip()
    if first[:1] == b"{" and first != b"{" and _suffix(path) in _LINE_SUFFIXES:  # otherwise one object over many lines
        for number, line in split_lines(file, separator=end, begun=begun):
            if line is None:
                yield Row(line=number, problem=TOO_LONG)
            elif line.strip():
                yield _in_utf8(_json_row(line, number=number), table)
        return
    pieces = [begun, *iter(file.read1, b"")]
    values = set_rows(load_json(b"".join(pieces), path=path, what=what), folder=table.root)
    if values is None:
        raise InputsError(
            f"Wanted a {what} that is a list of objects in JSON, got `{shown_name(path)}`.",
            hint='write [{"image": "a.jpg", "question": "...", "answer": "..."}, ...]',
        )
    for number, value in enumerate(values, start=1):
        yield Row(line=number, values=value) if isinstance(value, dict) else Row(line=number, problem=_NO_OBJECT)


def load_json(data: bytes, *, path: str, what: str) -> object:
    """The value of JSON; of several values, as in lines of JSON, their list. Raises `InputsError`."""
    try:
        values = list(_json_values(data.decode("utf-8-sig")))
        return values if values[1:] else values[0]
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _not_utf8(path, what=what, where=f"line {line:,}") from None
    except json.JSONDecodeError as error:
        reason = f"it is not valid JSON from line {error.lineno:,}, column {error.colno:,} on"
    except (ValueError, RecursionError):  # a number of thousands of digits, thousands of brackets
        reason = "it is not valid JSON"
    raise unreadable(path, what=what, reason=reason, hint="correct it, or copy it again")


def _json_values(text: str) -> Iterator[object]:
    """The values of a text, one after the other. Raises ValueError and RecursionError."""
    text, at = text.rstrip(), 0
    while at < len(text) or not at:
        while text[at : at + 1].isspace():
            at += 1
        value, at = JSON.raw_decode(text, at)
        yield value


def _json_row(line: bytes, *, number: int) -> Row:
    try:
        values = JSON.decode(line.decode(errors="surrogateescape"))
    except json.JSONDecodeError as error:
        return Row(line=number, problem=f"it is not valid JSON from column {error.colno} on")
    except (ValueError, RecursionError):
        return Row(line=number, problem="it is not valid JSON")
    return Row(line=number, values=values) if isinstance(values, dict) else Row(line=number, problem=_NO_OBJECT)


def _cell_rows(file: ByteFile, *, begun: bytes, table: _Table) -> Iterator[Row]:
    path, known = table.path, table.known
    separator = _SEPARATOR_LINE.match(begun)
    begun = begun if separator is None else begun[separator.end() :]
    end = line_end(begun)
    head = next(filter(lambda line: line.strip(b' \r",;|\t'), begun.split(end)), b"")
    default = "\t" if _suffix(path) == ".tsv" else ","
    delimiter = _delimiter(head, known=known, default=default) if separator is None else separator[1].decode()
    lines = (
        _LONG_LINE if line is None else line.decode(errors="surrogateescape") + "\n"
        for _, line in split_lines(file, separator=end, begun=begun)
    )
    quoted = rb'%b +"(?:[^"]|"")*" *(?:%b|[\r\n]|\Z)' % ((re.escape(delimiter.encode()),) * 2)
    has_spaces = delimiter != " " and re.search(quoted, begun) is not None  # before quotes, by the beginning
    records = _records(lines, delimiter=delimiter, skips_spaces=has_spaces)
    _, first, problem = next(records, (1, [], "it is empty"))
    names = [known_name(name, known) for name in first]
    given = [name for name in names if name]
    problem = problem or ("two of its columns have the same name" if len(set(given)) < len(given) else "")
    if problem:
        raise InputsError(
            f"Wanted a {table.what} with the names of its columns in the first line of `{shown_name(path)}`, but "
            f"{problem}.",
            hint="write the name of each column there, and none of them twice",
        )
    table.check_names(given, where="the first line")
    if any(map(_has_raw_bytes, given)):
        raise _not_utf8(path, what=table.what, where="the first line")
    for line, cells, reason in records:
        line += separator is not None
        if not reason and len(cells) != len(names):
            reason = f"it has {len(cells)} {'cells' if cells[1:] else 'cell'}, and the first line has {len(names)}"
        values = {} if reason else {name: cell for name, cell in zip(names, cells, strict=True) if name}
        yield _in_utf8(Row(line=line, values=values, problem=reason), table)


def _in_utf8(row: Row, table: _Table) -> Row:
    """The row, with a problem if a cell other than the name of a picture is not UTF-8.

    Raises InputsError instead if the file can be read again, so that `check_table` says it once, before the work.
    """
    odd = next(
        (name for name, cell in row.values.items() if name not in PICTURE_COLUMNS and _has_raw_bytes(cell)), None
    )
    if odd is None:
        return row
    if can_read_again(table.path):
        where = f"the cell `{shown_excerpt(odd)}` of line {row.line:,}"
        raise _not_utf8(table.path, what=table.what, where=where)
    return Row(line=row.line, problem="it is not UTF-8")


def _not_utf8(path: str, *, what: str, where: str) -> InputsError:
    return InputsError(f"Wanted a {what} in UTF-8, but {where} of `{shown_name(path)}` is not.", hint=_SAVE_AGAIN)


def _delimiter(head: bytes, *, known: Collection[str], default: str) -> str:
    """The delimiter that gives most known names; among equals `default`, else that with most cells."""

    def score(delimiter: str) -> tuple[int, bool, int]:
        try:
            names = next(csv.reader([text], delimiter=delimiter, skipinitialspace=True), [])
        except csv.Error:  # the reader of the whole table says what is wrong
            names = []
        return sum(known_name(name, known) in known for name in names), delimiter == default, len(names)

    text = head.decode(errors="replace")
    return max(_DELIMITERS, key=score)


def _records(lines: Iterator[str], *, delimiter: str, skips_spaces: bool) -> Iterator[tuple[int, list[str], str]]:
    """Line, cells and problem of every row with values. After a malformed row, reading continues at the next line.

    If a quote is not closed or not doubled, the problem names the lines that it swallowed, because each may name a
    picture.
    """
    reader, num_names = csv.reader(lines, delimiter=delimiter, strict=True, skipinitialspace=skips_spaces), 0
    while True:
        line, cells, problem = reader.line_num + 1, list[str](), ""
        try:
            cells = [cell.strip() for cell in next(reader)]
        except StopIteration:
            return
        except csv.Error as error:
            # Escaped like a name, because the message quotes the delimiter, which may be a tab.
            problem = f"it is not valid CSV ({shown_name(str(error))})"
            if reader.line_num > line:
                problem += f" and swallows the lines up to {reader.line_num:,}: a quote is not closed or not doubled"
        if _LONG_LINE in "".join(cells):
            problem = TOO_LONG
        while len(cells) > num_names > 0 and not cells[-1]:
            cells.pop()
        num_names = num_names or len(cells)
        if any(cells) or problem:
            yield line, cells, problem


def _has_raw_bytes(value: object) -> bool:
    """Whether a text, also inside a list or an object, has bytes that are not UTF-8."""
    return re.search("[\udc80-\udcff]", json.dumps(value, ensure_ascii=False)) is not None


def check_table(path: str, *, what: str, wanted: Sequence[str] = ()) -> Row | None:
    """Raise `InputsError` if a table is unusable as a whole, as far as it can be read more than once.

    Returns the first row, or None if it cannot be read again. Of Parquet only the schema is read, so its row has names
    without values.
    """
    check_suffix(path, what=what)
    check_lines(path, what=what)
    if not can_read_again(path):
        if _suffix(path) in (*_LINE_SUFFIXES, ".csv", ".tsv"):
            return None
        raise InputsError(
            f"Wanted a {what}, and `{shown_name(path)}` is a pipe or a device.",
            hint="`.json` and `.parquet` are read as a whole, more than once; `.jsonl` and `.csv` line by line",
        )
    rows = read_rows(path, what=what, wanted=wanted)
    if _suffix(path) == ".parquet":
        table = _Table(path=path, what=what, wanted=wanted, known=KNOWN_COLUMNS, root="")
        rows = _known_rows(parquet_rows(path, what=what, schema_alone=True), table)
    first = next(rows, None)
    if first is None:
        raise InputsError(f"Wanted rows in the {what} `{shown_name(path)}`, which has none.", hint="check the file")
    try:
        with opened_lines(path, what=what) as file:
            deque(codecs.iterdecode(iter(file.read1, b""), "utf-8"), maxlen=0)
    except UnicodeDecodeError:
        deque(rows, maxlen=0)
    return first


def check_pyarrow() -> None:
    """Raise UsageError if pyarrow is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"Parquet needs pyarrow, and it cannot be imported: {error}", hint=install_hint("parquet")
        ) from None


def parquet_rows(path: str, *, what: str, schema_alone: bool = False) -> Iterator[Row]:
    """The rows; one group of them is in memory. A picture inside is an object with its `bytes` and `path`.

    The rest of a group that cannot be read is one row with a problem. With `schema_alone`, if there are rows, there is
    one with the names of the columns, and None as values. Raises `InputsError` if the file is not of Parquet.
    """
    check_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = last = 0
    try:
        with pq.ParquetFile(path) as file:
            if schema_alone and file.metadata.num_rows:
                yield Row(line=1, values=dict.fromkeys(file.schema_arrow.names))
            classes = _classes(file.schema_arrow.metadata or {})
            for group in () if schema_alone else range(file.num_row_groups):  # several at once would all be kept
                last += file.metadata.row_group(group).num_rows
                try:
                    for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=[group]):
                        for values in batch.to_pylist():
                            number += 1
                            for name, names in classes.items():
                                if isinstance(value := values.get(name), int):
                                    values[name] = names.get(value, value)
                            yield Row(line=number, values=values)
                except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                    rows = "it" if last == number + 1 else f"it and the rows up to {last:,}"
                    reason = f"{rows} cannot be read: the file is damaged ({first_line(error)})"
                    yield Row(line=number + 1, problem=reason)
                    number = last
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, what=what, reason=first_line(error), hint="copy it again") from None


def _classes(metadata: Mapping[bytes, bytes]) -> dict[str, dict[int, str | None]]:
    """The names of classes by number, for each column, as the `datasets` library keeps them; -1 is a missing label."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"].items()
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        return {}
    classes = dict[str, dict[int, str | None]]()
    for column, feature in features:
        match feature:
            case {"_type": "ClassLabel", "names": list(names)}:
                classes[column] = {-1: None, **dict(enumerate(map(str, names)))}
    return classes
