"""Appends records to a file, so that no record is lost by a crash, a full disk or a second writer."""

import os
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from llama_adapter.app.jobs.records.loss import check_file, has_name, is_at, is_standard_output
from llama_adapter.app.jobs.records.record import Record, json_line, parse_record
from llama_adapter.runtime.atomic_write import sync_folder
from llama_adapter.runtime.locking import open_locked
from llama_adapter.runtime.partial import named_after
from llama_adapter.runtime.record_lines import (
    MAX_RECORD_BYTES,
    PART_NAME,
    RecordFileError,
    is_begun,
    is_torn,
    no_records,
    without_zeros,
)

_SYNC_S = 2.0


def open_records(out: str) -> "RecordWriter":
    """Open the writer of a job's records. If `out` is a folder or ends with a slash, it appends to the last part there.

    Parts are called part-00000.jsonl and so on. Raises the errors of `RecordWriter`.
    """
    path, older = Path(out), list[Path]()
    if out.endswith(("/", os.sep)) or path.is_dir():
        found = ((PART_NAME.fullmatch(part.name), part) for part in (path.iterdir() if path.is_dir() else ()))
        parts = sorted((int(match[1]), part) for match, part in found if match is not None)
        *older, path = [part for _, part in parts] or [path / "part-00000.jsonl"]
    return RecordWriter(path, older=tuple(older))


class RecordWriter(AbstractContextManager["RecordWriter"]):
    """Appends records to a file. Records that were written survive a crash.

    Opening creates the file, locks it (flock) and repairs a last line without line feed, as a crash may leave it: a
    complete record gets its line feed (`repair` is "completed"), an incomplete one is cut off ("dropped"). Every record
    is passed to the operating system immediately. Records are synced to disk after every `sync_every` records, after
    two seconds, and at the end. At each sync, the file is compared with its path. If a record cannot be written
    completely, the written part is removed. A new file that stays empty is deleted. Pipes and devices such as
    /dev/stdout are only written to.

    Raises `RecordFileError` if another run writes to the file, and for a file with other content (which is left
    unchanged), `RecordFileLostError` if another program removes, replaces or changes the file during the run, and
    OSError.
    """

    def __init__(self, path: str | os.PathLike[str], *, older: tuple[Path, ...] = (), sync_every: int = 64) -> None:
        """`older` are files of earlier runs in the same folder. They are read and cleared together with this file."""
        self.path = Path(path)
        self.repair: str | None = None
        self.is_locked = False
        self._sync_every, self._num_unsynced, self._synced_at = sync_every, 0, time.monotonic()
        self.is_durable = not self.path.exists() or self.path.is_file()
        # Of records, oldest first; none for pipes and devices.
        self.files: tuple[Path, ...] = (*older, self.path) if self.is_durable else ()
        self._is_new = not os.path.lexists(self.path)
        self._is_name_synced = not self._is_new
        if self.is_durable:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open()
        try:
            if self.is_durable:
                self.repair = _repair(self._file, self.path)
                self._end = self._file.seek(0, os.SEEK_END)
            self._place = Path(os.path.realpath(self.path))
            self._is_checked = self.is_durable and has_name(self._file) and not is_standard_output(self._file)
        except BaseException:
            self._file.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, record: Record) -> None:
        """Append one record."""
        line = json_line(record).encode() + b"\n"
        rest = memoryview(line)
        with named_after(self.path):
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                if self.is_durable and self._size() == self._end + len(line) - len(rest):  # no other program wrote
                    self._file.truncate(self._end)  # works on a full disk
                raise
        if self.is_durable:
            self._end += len(line)
            self._num_unsynced += 1
            if self._num_unsynced >= self._sync_every or time.monotonic() - self._synced_at >= _SYNC_S:
                self.sync()

    def sync(self) -> None:
        """Sync everything written to disk. Raises `RecordFileLostError`, only once, if the file is not at its path."""
        if not self.is_durable:
            return
        with named_after(self.path):
            os.fsync(self._file.fileno())
        if not self._is_name_synced:
            sync_folder(self.path.parent)
            self._is_name_synced = True
        self._num_unsynced, self._synced_at = 0, time.monotonic()
        if self._is_checked:
            self._is_checked = False  # the error is raised only once
            check_file(self._file, path=self.path, place=self._place, num_bytes=self._end)
            self._is_checked = True

    def clear(self) -> None:
        """Delete all records. Not for pipes and devices."""
        for part in self.files[:-1]:
            with RecordWriter(part) as writer:  # raises for other files and other writers
                writer.clear()
            part.unlink()
        self.files = (self.path,)
        self._file.truncate(0)
        self._end = 0

    def close(self) -> None:
        """Sync everything written and close the file. Further calls do nothing. Raises the errors of `sync`."""
        if self._file.closed:
            return
        try:
            if self._is_new and self.is_durable and self._end == 0:
                if is_at(self.path, self._file) and self._size() == 0:
                    self.path.unlink(missing_ok=True)  # before the lock is released
            else:
                self.sync()
        finally:
            self._file.close()

    def _open(self) -> BinaryIO:
        if not self.is_durable:  # devices and pipes cannot be opened for reading and writing
            return open(self.path, "ab", buffering=0)
        try:
            with named_after(self.path):
                file, self.is_locked = open_locked(self.path)
        except BlockingIOError:
            raise RecordFileError(
                f"Another run is writing to `{self.path}`; wait for it to end, stop it, or name another file."
            ) from None
        return file

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size


def _repair(file: BinaryIO, path: Path) -> str | None:
    """Repair the last line. Returns "completed", "dropped", or None if there was nothing to repair.

    Raises RecordFileError, and changes nothing, if the line is neither a complete record nor the beginning of one.
    """
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return None
    file.seek(0)
    first_line = without_zeros(_read_line(file))
    # Only a file of records may be cut. A picture that was named by mistake must not be damaged.
    if parse_record(first_line) is None and (first_line.endswith(b"\n") or not is_begun(first_line)):
        raise no_records(path, where="line 1", line=first_line)
    start = _start_of_last_line(file)
    file.seek(start)
    last_line = _read_line(file)
    if not last_line:
        return None
    whole, reaches_end = without_zeros(last_line), start + len(last_line) == size
    if reaches_end and parse_record(whole) is not None:
        file.truncate(start + len(whole))
        file.write(b"\n")
        repair = "completed"
    elif reaches_end and is_torn(last_line):
        file.truncate(start)
        repair = "dropped"
    else:
        raise no_records(path, where="its end", line=last_line)
    os.fsync(file.fileno())
    return repair


def _read_line(file: BinaryIO) -> bytes:
    """Read a line of up to `MAX_RECORD_BYTES`. On unbuffered files, `readline` would read byte by byte."""
    line = bytearray()
    while b"\n" not in line[-65536:] and len(line) <= MAX_RECORD_BYTES and (more := file.read(65536)):
        line += more
    end = line.find(b"\n")
    return bytes(line[: end + 1] if end >= 0 else line)


def _start_of_last_line(file: BinaryIO) -> int:
    """Offset after the last line feed, searched from the end of the file."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = file.seek(max(0, end - 65536))
        position = file.read(end - start).rfind(b"\n")
        if position >= 0:
            return start + position + 1
        end = start
    return 0
