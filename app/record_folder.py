"""Answers in a folder of record files, for jobs whose records are too many for one: part-00000.jsonl and so on."""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from app.records.file import RecordFileLockedError, RecordWriter
from app.records.record import Record, read_record_lines

DEFAULT_RECORDS_PER_PART = 100_000

_PART = re.compile(r"part-(\d{5,})\.jsonl")


def is_record_folder(path: str | os.PathLike[str]) -> bool:
    """Whether answers at this place are kept in a folder: there is one, or the name ends as those of folders do."""
    return os.fspath(path).endswith(os.sep) or os.path.isdir(path)


def parts_of(folder: str | os.PathLike[str]) -> list[Path]:
    """The record files of a folder, in the order in which they were written; whatever else is in it does not count."""
    with os.scandir(folder) as entries:
        numbered = [(int(found[1]), entry.name) for entry in entries if (found := _PART.fullmatch(entry.name))]
    return [Path(folder, name) for _, name in sorted(numbered)]


def read_folder_lines(folder: str | os.PathLike[str]) -> Iterator[tuple[Path, int, Record]]:
    """The records of all parts, each with its file and the offset of its line there. Raises as `read_record_lines`."""
    for part in parts_of(folder):
        for offset, record in read_record_lines(part):
            yield part, offset, record


class RecordFolder:
    """Appends records to a folder as `RecordWriter` does to a file: the same promises, and a new part now and then.

    Parts that are full are never written to again, so that they can be copied away while a job goes on. The folder is
    locked as a whole; one that is made here and stays empty is removed again.
    """

    is_file = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        records_per_part: int = DEFAULT_RECORDS_PER_PART,
        sync_every: int = 64,
    ) -> None:
        if records_per_part < 1:
            raise ValueError(f"records_per_part must be at least 1, got {records_per_part}")
        self.path = Path(path)
        self.num_written = 0
        self._records_per_part, self._sync_every = records_per_part, sync_every
        self._is_new = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        self._folder: int | None = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _lock(self._folder, self.path)
            self._number, self._part = self._open_last()
        except BaseException:
            os.close(self._folder)
            raise
        self.repair = self._part.repair
        self._num_in_part = _num_lines(self._part.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, record: Record) -> None:
        """Append one record."""
        if self._num_in_part >= self._records_per_part:
            self._part.close()
            self._number, self._num_in_part = self._number + 1, 0
            self._part = self._open(self._number)
        self._part.write(record)
        self._num_in_part += 1
        self.num_written += 1

    def clear(self) -> None:
        """Throw away what the folder holds of records, to begin anew."""
        self._part.close()
        for part in parts_of(self.path):
            part.unlink()
        self._number, self._num_in_part = 0, 0
        self._part = self._open(0)

    def close(self) -> None:
        """Make everything written durable; further calls do nothing."""
        if self._folder is None:
            return
        folder, self._folder = self._folder, None
        try:
            self._part.close()
            os.fsync(folder)  # the parts' names
            if self._is_new:
                with suppress(OSError):  # it has parts
                    self.path.rmdir()
        finally:
            os.close(folder)

    def _open_last(self) -> tuple[int, RecordWriter]:
        parts = parts_of(self.path)
        number = int(parts[-1].stem.removeprefix("part-")) if parts else 0
        return number, self._open(number)

    def _open(self, number: int) -> RecordWriter:
        return RecordWriter(self.path / f"part-{number:05}.jsonl", sync_every=self._sync_every)


RecordFile = RecordWriter | RecordFolder


def open_records(path: str | os.PathLike[str]) -> RecordFile:
    """What appends to a file or a folder of records. Raises as `RecordWriter` does."""
    return RecordFolder(path) if is_record_folder(path) else RecordWriter(path)


def _lock(folder: int, path: Path) -> None:
    """Keep other writers out, also between two parts. Where folders have no locks, those of the parts remain."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RecordFileLockedError(
            f"Another run is writing to `{path}`; wait for it to end, stop it, or name another folder."
        ) from None
    except OSError:
        return


def _num_lines(path: Path) -> int:
    with open(path, "rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(2**20), b""))
