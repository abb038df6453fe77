"""The table that `label` writes: a row for each labelled picture, on disk before the next picture is shown."""

import csv
import errno
import io
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llama_adapter.app.pictures.inputs.fields import as_template
from llama_adapter.runtime.atomic_write import atomic_write, require_place, sync_folder
from llama_adapter.runtime.errors import LlamaAdapterError, UsageError
from llama_adapter.runtime.locking import locked_output
from llama_adapter.runtime.text import shown_excerpt, shown_name

_MARK: Final = "\ufeff"  # the byte order mark that spreadsheets write
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
    line: int  # its first line in the file, from 0


class LabelTable:
    """A CSV file with the columns picture and label, and question if there is one.

    Opening locks the table and reads its rows. The first label creates the file. Every change replaces it as a whole,
    so it is complete at every moment, also if the process is killed. It keeps its mode. If every label is removed, the
    header is left.

    Raises UsageError for a file with other content, OutputLockedError if another process has the table open, and
    OSError.
    """

    def __init__(self, path: str | os.PathLike[str], *, question: str | None = None) -> None:
        """`question` is that of new rows; None: the table has no column for it."""
        self.path, self.question = Path(path), None if question is None else as_template(question)
        self.columns = ("picture", "label") if question is None else ("picture", "question", "label")
        if self.path.suffix.lower() != ".csv":
            raise UsageError(
                f"Wanted a table called .csv as --out, got `{shown_name(path)}`", hint="name it labels.csv"
            )
        if self.path.exists() and not self.path.is_file():
            raise UsageError(f"Wanted a file as --out, and `{shown_name(path)}` is none", hint=_OTHER)
        if self.path.exists() and not os.access(self.path, os.W_OK):  # a folder's mode alone allows replacing it
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        require_place(self.path)
        with ExitStack() as stack:
            stack.enter_context(locked_output(self.path))
            self._content = self._found()
            self._lines = self._read_lines()
            self.rows = self._read_rows()
            self._lock = stack.pop_all()

    def close(self) -> None:
        """Release the lock. May be called again."""
        self._lock.close()

    def add(self, picture: str, label: str) -> None:
        """Append a row. After an error, the table is as before. Raises LabelTableChangedError and OSError."""
        row = LabelRow(picture, label, self.question, len(self._lines))
        cells = {"picture": picture, "label": label, "question": self.question or ""}
        self._write([*self._lines, _line([cells[name] for name in self.columns])])
        self.rows.append(row)

    def remove_last(self) -> LabelRow:
        """Remove the last row and return it. Raises IndexError without rows, LabelTableChangedError and OSError."""
        self._write(self._lines[: self.rows[-1].line])
        return self.rows.pop()

    def _write(self, lines: list[str]) -> None:
        if self._found() != self._content:
            raise LabelTableChangedError(f"Another program changed or moved `{shown_name(self.path)}`")
        content = "".join(lines).encode()
        with atomic_write(self.path) as file:
            if self.path.exists():
                shutil.copymode(self.path, file.name)
            file.write(content)
        sync_folder(Path(os.path.realpath(self.path)).parent)
        self._lines, self._content = lines, content

    def _found(self) -> bytes:
        return self.path.read_bytes() if self.path.is_file() else b""

    def _read_lines(self) -> list[str]:
        """The lines of the file with their ends; of a new one, its header."""
        try:
            lines = list(io.StringIO(self._content.decode(), newline=""))
        except UnicodeDecodeError as error:
            raise self._is_no_csv(error) from None
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += "\n"
        return lines or [_line(self.columns)]

    def _read_rows(self) -> list[LabelRow]:
        rows: list[LabelRow] = []
        records = csv.reader((line.removeprefix(_MARK) for line in self._lines), skipinitialspace=True, strict=True)
        line, is_header = 0, True
        try:
            for cells in records:
                cells = [cell.strip() for cell in cells]
                if is_header and tuple(name.lower() for name in cells) != self.columns:
                    raise UsageError(
                        f"Wanted a table with the columns {','.join(self.columns)} in `{shown_name(self.path)}`, got "
                        f"{shown_excerpt(','.join(cells))}",
                        hint=f"pass --question as in the run that wrote it, or {_OTHER}",
                    )
                if cells and len(cells) != len(self.columns):
                    raise UsageError(
                        f"Wanted {len(self.columns)} cells in each row of `{shown_name(self.path)}`, got "
                        f"{shown_excerpt(','.join(cells))}",
                        hint=f"correct this row, or {_OTHER}",
                    )
                if cells and not is_header:
                    row = dict(zip(self.columns, cells, strict=True))
                    rows.append(LabelRow(row["picture"], row["label"], row.get("question"), line))
                line, is_header = records.line_num, False
        except csv.Error as error:
            raise self._is_no_csv(f"{error} in the row that begins in line {line + 1}") from None
        return rows

    def _is_no_csv(self, why: object) -> UsageError:
        hint = f"correct it, or {_OTHER}"
        return UsageError(f"`{shown_name(self.path)}` is not CSV in UTF-8: {why}", hint=hint)


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


def _line(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()
