"""Formats records as JSON lines, as a table for spreadsheets, and as a zip of text files."""

import csv
import io
import itertools
import os
import re
import unicodedata
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from llama_adapter.app.jobs.records.record import Record, json_line
from llama_adapter.app.pictures.names import name_key
from llama_adapter.runtime.text import one_line, shown_name

CSV_COLUMNS: Final = (
    *("picture", "text", "finish", "unfamiliar", "tokens", "ms"),
    *("error", "reason", "prompt", "id", "run"),
)
FAILED_NAME: Final = "failed.txt"
OTHER_NAMES: Final = "other-names.txt"

Cell = str | int | float | None

# Spreadsheets treat a cell that begins with one of these, or with its full-width form, as a formula:
# https://owasp.org/www-community/attacks/CSV_Injection
_FORMULA_STARTS: Final = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")
_NOT_IN_NAMES: Final = re.compile(r'[<>:"|?*\x00-\x1f\x7f\ud800-\udfff]')
_UNDECODED: Final = re.compile(r"[\udc80-\udcff]")  # bytes that are not UTF-8, as surrogates
_RESERVED_NAMES: Final = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
_MAX_PART_BYTES: Final = 180


def to_jsonl(records: Iterable[Record]) -> bytes:
    """The lines that `llama-adapter caption --out` writes."""
    return b"".join(json_line(record).encode() + b"\n" for record in records)


def to_csv(records: Sequence[Record]) -> bytes:
    """A table for spreadsheets: UTF-8 with a byte order mark, every cell quoted, one column for each choice.

    A text that a spreadsheet would treat as a formula, also after leading spaces, gets an apostrophe in front. Programs
    should read `to_jsonl`, which changes nothing.
    """
    choices = list(dict.fromkeys(text for record in records for text in record["choice"] or ()))
    head = [*CSV_COLUMNS, *(f"probability of {text}" for text in choices)]
    rows = ([*csv_cells(record), *((record["choice"] or {}).get(text) for text in choices)] for record in records)
    return b"".join(csv_lines(itertools.chain([head], rows)))


def csv_cells(record: Record) -> list[Cell]:
    """The cells of one record under `CSV_COLUMNS`."""
    error, total_ms = record["error"], record["ms"].get("total")
    return [
        *(record["picture"], record["text"], record["finish"], record.get("unfamiliar"), record["tokens"], total_ms),
        *(("", "") if error is None else (error["code"], error["message"])),
        *(record["prompt"], record["id"], record["run"]),
    ]


def csv_lines(rows: Iterable[Sequence[Cell]]) -> Iterator[bytes]:
    """The rows of a table for spreadsheets, see `to_csv`."""
    line = io.StringIO(newline="")
    writer = csv.writer(line, quoting=csv.QUOTE_ALL)
    yield b"\xef\xbb\xbf"
    for row in rows:
        writer.writerow([defused(cell) if isinstance(cell, str) else cell for cell in row])
        yield line.getvalue().encode(errors="backslashreplace")
        line.seek(0)
        line.truncate()


def defused(cell: str) -> str:
    """The text of a cell, changed so that no spreadsheet evaluates it as a formula."""
    is_formula = cell.startswith(_FORMULA_STARTS) or cell.lstrip().startswith(_FORMULA_STARTS)
    return f"'{cell}" if is_formula else cell


def to_sidecars(records: Sequence[Record]) -> bytes:
    """A zip with a `.txt` file for each picture, named after it, as programs that train captioning models expect.

    Folders are kept. Names are made unique and valid on any system. `FAILED_NAME` lists pictures without an answer,
    with the reasons, and `OTHER_NAMES` texts that are not called as their picture, because another one is.
    """
    names, packed = SidecarNames(), io.BytesIO()
    for record in records:
        if record["error"] is None:
            names.avoid_folders_of(safe_path(record["picture"]))
    lists: dict[str, list[str]] = {OTHER_NAMES: [], FAILED_NAME: []}
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for record in records:
            if (error := record["error"]) is not None:
                reason = f"{error['code']}: {error['message']}"
                lists[FAILED_NAME].append(f"{shown_name(record['picture'])}: {reason}\n")
                continue
            path = safe_path(record["picture"])
            name = names.take(path)
            if name != names.usual(path):
                lists[OTHER_NAMES].append(f"{shown_name(path)}: {shown_name(name)}\n")
            _write(archive, name, one_line(record["text"]) + "\n")  # trainers take each line as a caption
        for name, lines in lists.items():
            if lines:
                _write(archive, names.take(name), "".join(lines))
    return packed.getvalue()


def _write(archive: zipfile.ZipFile, name: str, text: str) -> None:
    entry = zipfile.ZipInfo(name)  # dated 1980, so that equal records give equal files
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    archive.writestr(entry, text.encode(errors="backslashreplace"))


def safe_path(name: str) -> str:
    """A relative path that is valid on every system, without `..` and without reserved device names.

    A byte that is not UTF-8 is replaced by its number, such as `%FF`.
    """
    parts = [_safe_part(part) for part in name.replace("\\", "/").split("/") if part.strip(". ")]
    return "/".join(parts) or "picture"


def _safe_part(part: str) -> str:
    text = _UNDECODED.sub(lambda byte: f"%{ord(byte[0]) & 0xFF:02X}", unicodedata.normalize("NFC", part))
    text = _NOT_IN_NAMES.sub("_", text).strip().rstrip(". ")
    stem, suffix = os.path.splitext(text)
    while len((stem + suffix).encode()) > _MAX_PART_BYTES:
        stem, suffix = (stem[:-1], suffix) if len(stem) > 1 else (stem, suffix[:-1])
    text = stem + suffix
    return f"_{text}" if _RESERVED_NAMES.fullmatch(text) else text


class SidecarNames:
    """Assigns unique names to text files."""

    def __init__(self, *, suffix: str = ".txt", is_added: bool = False, is_beside: bool = False) -> None:
        """`suffix` replaces that of the picture, or is added to it: `a.png.xmp`.

        Texts beside pictures that differ only in case are in a file system that distinguishes them.
        """
        self._taken: set[int] = set()  # digests, as there may be millions of names
        self._numbers: dict[str, int] = {}  # by repeated path: the number that is tried next
        self._suffix, self._is_added, self._is_beside = suffix, is_added, is_beside

    def avoid_folders_of(self, path: str) -> None:
        """Never assign the name of a folder that contains this picture. Call it before the first `take`."""
        parts = path.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            self._taken.update(self._keys("/".join(parts[:depth])))

    def usual(self, path: str) -> str:
        """The name of a picture's text if no other file has it: `a/b.png` -> `a/b.txt`."""
        return (path if self._is_added else os.path.splitext(path)[0]) + self._suffix

    def take(self, path: str) -> str:
        """`a/b.png` -> `a/b.txt`; if taken, ignoring case, `a/b.png.txt`, then `a/b (2).txt` and so on."""
        stem, full = os.path.splitext(path)[0], f"{path}{self._suffix}"
        candidate, number = self.usual(path), self._numbers.get(path, 1)
        while self._keys(candidate)[self._is_beside and candidate == full] in self._taken:
            candidate = full if number == 1 else f"{stem} ({number}){self._suffix}"
            number += 1
        if number > 1:
            self._numbers[path] = number
        self._taken.update(self._keys(candidate))
        return candidate

    def _keys(self, name: str) -> tuple[int, int]:
        """Keys of a name, ignoring case and not."""
        return name_key(name.casefold()), name_key(f"\0{name}")
