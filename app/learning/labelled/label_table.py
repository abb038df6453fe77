"""The table that `label` writes: a row for each labelled picture, on disk before the next picture is shown."""

import csv
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llama_adapter.app.jobs.records.loss import is_at
from llama_adapter.app.pictures.inputs.fields import as_template
from llama_adapter.runtime.atomic_write import sync_folder
from llama_adapter.runtime.errors import LlamaAdapterError, UsageError
from llama_adapter.runtime.locking import OutputLockedError, open_locked
from llama_adapter.runtime.partial import named_after
from llama_adapter.runtime.terminal.standard_output import write_whole
from llama_adapter.runtime.text import shown_excerpt, shown_name

_MARK: Final = b"\xef\xbb\xbf"  # the byte order mark that spreadsheets write
_OTHER: Final = "name another --out, or move this file away"


class LabelTableChangedError(LlamaAdapterError):
    """Another program changed, moved or removed the table while it was written."""

    default_hint = "stop `label`, see to the file, and start again: labelled pictures are not asked again"


@dataclass(frozen=True, slots=True)
class LabelRow:
    """A row of the table."""

    picture: str  # its cell: relative to the table's folder, or absolute
    label: str
    question: str | None  # as a template: its braces are doubled
    offset: int  # of its first byte in the file


class LabelTable:
    """A CSV file with the columns picture and label, and question if there is one.

    Opening creates the file, locks it and reads its rows. A last row without its line feed, which a crash may leave,
    gets one if it is complete, and is removed otherwise. The file ends after a complete row at every moment, also if
    the process is killed.

    Raises UsageError for a file with other content, which is left unchanged, OutputLockedError if another process has
    the table open, and OSError.
    """

    def __init__(self, path: str | os.PathLike[str], *, choices: Sequence[str], question: str | None = None) -> None:
        """`question` is that of new rows; None: the table has no column for it."""
        self.path, self.question = Path(path), None if question is None else as_template(question)
        self.columns = ("picture", "label") if question is None else ("picture", "question", "label")
        if self.path.suffix.lower() != ".csv":
            raise UsageError(
                f"Wanted a table called .csv as --out, got `{shown_name(path)}`", hint="name it labels.csv"
            )
        if self.path.exists() and not self.path.is_file():
            raise UsageError(f"Wanted a file as --out, and `{shown_name(path)}` is none", hint=_OTHER)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._is_new = not self.path.exists()
        try:
            self._file, _ = open_locked(self.path)
        except BlockingIOError:
            raise OutputLockedError(f"Another run is writing `{shown_name(path)}`") from None
        try:
            self.rows = self._read(choices)
            self._end = self._file.seek(0, os.SEEK_END)
            if self._end == 0:
                self._write(_line(self.columns))
                sync_folder(self.path.parent)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file and release its lock; a new file without rows is removed. May be called again."""
        if self._file.closed:
            return
        if self._is_new and not self.rows and is_at(self.path, self._file):
            self.path.unlink()  # before the lock is released
        self._file.close()

    def add(self, picture: str, label: str) -> None:
        """Append a row and sync it. After an error, the table is as before. Raises LabelTableChangedError, OSError."""
        cells = {"picture": picture, "label": label, "question": self.question or ""}
        offset = self._end
        self._write(_line([cells[name] for name in self.columns]))
        self.rows.append(LabelRow(picture, label, self.question, offset))

    def remove_last(self) -> LabelRow:
        """Remove the last row and return it. Raises IndexError without rows, LabelTableChangedError and OSError."""
        row = self.rows[-1]
        self._require_unchanged()
        with named_after(self.path):
            self._file.truncate(row.offset)
            self._end = row.offset
            self.rows.pop()
            os.fsync(self._file.fileno())
        return row

    def _write(self, line: bytes) -> None:
        self._require_unchanged()
        try:
            with named_after(self.path):
                write_whole(self._file, line)
                os.fsync(self._file.fileno())
        except BaseException:
            with suppress(OSError):
                self._file.truncate(self._end)  # works on a full disk
            raise
        self._end += len(line)

    def _require_unchanged(self) -> None:
        if is_at(self.path, self._file) is False or os.fstat(self._file.fileno()).st_size != self._end:
            raise LabelTableChangedError(f"Another program changed or moved `{shown_name(self.path)}`")

    def _read(self, choices: Sequence[str]) -> list[LabelRow]:
        """The rows of the file, whose end is repaired."""
        self._file.seek(0)
        data = self._file.readall()  # type: ignore[attr-defined]  # a file without a buffer
        rows: list[LabelRow] = []
        for number, (offset, record) in enumerate(_records(data)):
            is_whole, is_header = record.endswith(b"\n"), number == 0
            cells = self._cells(record, is_cut=not (is_whole or is_header))
            if not is_whole and self._is_torn(record, cells, choices=choices, is_header=is_header):
                self._file.truncate(offset)
                return rows
            if is_header and tuple(name.lower() for name in cells) != self.columns:
                raise UsageError(
                    f"Wanted a table with the columns {','.join(self.columns)} in `{shown_name(self.path)}`, got "
                    f"{shown_excerpt(','.join(cells))}",
                    hint=f"pass --question as in the run that wrote it, or {_OTHER}",
                )
            if not is_header and cells and len(cells) != len(self.columns):
                raise UsageError(
                    f"Wanted {len(self.columns)} cells in each row of `{shown_name(self.path)}`, got "
                    f"{shown_excerpt(','.join(cells))}",
                    hint=f"correct this row, or {_OTHER}",
                )
            if not is_whole:
                self._file.write(b"\n")
            if cells and not is_header:
                row = dict(zip(self.columns, cells, strict=True))
                rows.append(LabelRow(row["picture"], row["label"], row.get("question"), offset))
        return rows

    def _cells(self, record: bytes, *, is_cut: bool) -> list[str]:
        """The cells of a record. Of one that a crash may have cut, anything is accepted."""
        try:
            text = record.removeprefix(_MARK).decode(errors="replace" if is_cut else "strict")
            return [cell.strip() for cell in next(csv.reader([text.rstrip("\r\n")], skipinitialspace=True), [])]
        except (UnicodeDecodeError, csv.Error) as error:
            raise UsageError(f"`{shown_name(self.path)}` is not CSV in UTF-8: {error}", hint=_OTHER) from None

    def _is_torn(self, record: bytes, cells: Sequence[str], *, choices: Sequence[str], is_header: bool) -> bool:
        """Whether the last record is the beginning of a line that this class writes, and not all of it."""
        if is_header:
            return record != (line := _line(self.columns).rstrip()) and line.startswith(record)
        is_begun = any(choice.startswith(cells[-1]) and choice != cells[-1] for choice in choices) if cells else True
        return is_begun or len(cells) < len(self.columns) or b"\0" in record or record.count(b'"') % 2 == 1


def picture_cell(name: str, *, folder: str | os.PathLike[str]) -> str:
    """How a table in `folder` names a picture: relative to the folder if it is inside, absolute otherwise.

    `name` is relative to the current folder. Raises ValueError with the reason if a table cannot hold the name.
    """
    path, root = os.path.abspath(name), os.path.join(os.path.abspath(folder), "")
    cell = path.removeprefix(root)
    try:
        cell.encode()
    except UnicodeEncodeError:
        raise ValueError("its name is not UTF-8, which a table cannot hold; rename it") from None
    if cell != cell.strip() or any(ord(character) < 32 for character in cell):
        raise ValueError("its name has line feeds, or white space at an end, which a table cannot hold; rename it")
    return cell


def picture_path(cell: str, *, folder: str | os.PathLike[str]) -> str:
    """The picture that a cell of a table in `folder` names: an absolute path without links, to compare pictures."""
    return os.path.realpath(os.path.join(folder, cell))


def _line(cells: Sequence[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The records of a CSV file with their offsets. A record ends at a line feed outside quotes."""
    offset, record = 0, b""
    for line in io.BytesIO(data):
        record += line
        if record.count(b'"') % 2 == 0:
            yield offset, record
            offset, record = offset + len(record), b""
    if record:
        yield offset, record
