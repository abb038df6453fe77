"""Appending to a file of answers so that no crash, full disk or second writer costs what is in it."""

import errno
import fcntl
import os
import time
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from llama_adapter.app.records.loss import check_file, has_name, is_at, is_standard_output, sync_folder
from llama_adapter.app.records.record import Record, RecordFileError, no_records, parse_record, record_to_line
from llama_adapter.app.records.tail import MAX_RECORD_BYTES, is_begun, is_torn, without_zeros

_SYNC_S = 2.0


class RecordFileLockedError(RecordFileError):
    """Another run writes into the file."""


class RecordWriter:
    """Appends records to a file; what was written before survives a crash.

    Opening takes a lock that two writers cannot have at once (flock: gone with the process that has it, however that
    ends), and repairs a last line that a crash left torn: a whole record gets its line feed (`repair` is "completed"),
    a torn one is cut off ("dropped"), and anything else is refused. Every record reaches the operating system at once,
    so it survives the death of this process. After every `sync_every` records, after two seconds, and at the end,
    records are synced to the disk (fsync), the file's name with the first of them, and `check_file` compares the file
    with its path. A record that cannot be written whole, as on a full disk, is taken back. Pipes and
    devices such as /dev/stdout are written to without lock, repair, fsync or check. A file is made at once, so that a
    place that cannot be written shows; if it is still empty at the end, it is removed again.

    Raises `RecordFileLockedError` when another process has the file, `RecordFileError` when it holds something else
    than records, which is then left alone, `RecordFileLostError` when another program removed, replaced or changed it
    during the run, and OSError when it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, sync_every: int = 64) -> None:
        if sync_every < 1:
            raise ValueError(f"sync_every must be at least 1, got {sync_every}")
        self.path = Path(path)
        self.num_written = 0
        self.repair: str | None = None
        self.is_locked = False
        self._sync_every, self._num_unsynced, self._synced_at = sync_every, 0, time.monotonic()
        self.is_durable = not self.path.exists() or self.path.is_file()
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def files(self) -> tuple[Path, ...]:
        """The file, where it can be read again."""
        return (self.path,) if self.is_durable else ()

    def write(self, record: Record) -> None:
        """Append one record."""
        line = record_to_line(record).encode() + b"\n"
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            if self.is_durable and self._size() == self._end + len(line) - len(rest):  # nobody else wrote meanwhile
                self._file.truncate(self._end)  # half a line is nothing to anybody; a full disk takes this
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.num_written += 1
        if self.is_durable:
            self._end += len(line)
            self._num_unsynced += 1
            if self._num_unsynced >= self._sync_every or time.monotonic() - self._synced_at >= _SYNC_S:
                self.sync()

    def sync(self) -> None:
        """Make everything written durable. Raises `RecordFileLostError`, once, where it is not in its place."""
        if not self.is_durable:
            return
        os.fsync(self._file.fileno())
        if not self._is_name_synced:
            sync_folder(self.path.parent)
            self._is_name_synced = True
        self._num_unsynced, self._synced_at = 0, time.monotonic()
        if self._is_checked:
            self._is_checked = False  # the fault of a file is raised once
            check_file(self._file, path=self.path, place=self._place, num_bytes=self._end)
            self._is_checked = True

    def clear(self) -> None:
        """Throw away what the file holds, to begin anew."""
        if self.is_durable:
            self._file.truncate(0)
            self._end = 0

    def close(self) -> None:
        """Make everything written durable and close the file; further calls do nothing. Raises as `sync`."""
        if self._file.closed:
            return
        try:
            if self._is_new and self.is_durable and self._end == 0:
                self._remove_empty()  # before the lock goes: nobody has begun to write into it
            else:
                self.sync()
        finally:
            self._file.close()

    def _open(self) -> BinaryIO:
        """The file, locked. Whoever had it may have removed it meanwhile: then the name is another file's."""
        while True:
            # Not "ab": a file is also read for repair. Devices and pipes cannot be read and appended to at once.
            file = open(self.path, "a+b" if self.is_durable else "ab", buffering=0)  # noqa: SIM115 - closed by close()
            if not self.is_durable:
                return file
            try:
                self.is_locked = _locked(file, self.path)
                if not self.is_locked or os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):
                    return file
            except FileNotFoundError:
                pass
            except BaseException:
                file.close()
                raise
            file.close()

    def _remove_empty(self) -> None:
        if is_at(self.path, self._file) and self._size() == 0:
            self.path.unlink(missing_ok=True)

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size


class FileLock:
    """A lock by a file of its own, which stays. Raises `RecordFileLockedError` where another process has it."""

    def __init__(self, path: Path, *, what: Path) -> None:
        """`what` is what the lock is for, as messages name it."""
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        try:
            self.is_locked = _locked(self._file, what)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Give it back; harmless when repeated."""
        self._file.close()


def _locked(file: BinaryIO, path: Path) -> bool:
    """Lock the file for this process; False where the file system has no locks."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RecordFileLockedError(
            f"Another run is writing to `{path}`; wait for it to end, stop it, or name another file."
        ) from None
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return False
        raise
    return True


def _repair(file: BinaryIO, path: Path) -> str | None:
    """Give the file whole lines again; says what was done to the last one, None where nothing was wrong.

    Raises RecordFileError, and changes nothing, where that is neither a whole record nor the beginning of one.
    """
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return None
    file.seek(0)
    first_line = _read_line(file)
    # Cutting off a line is only right in a file of ours: a picture named by mistake must not lose its tail.
    if parse_record(first_line) is None and (first_line.endswith(b"\n") or not is_begun(first_line)):
        raise no_records(path, where="line 1", line=first_line)
    start = _start_of_last_line(file)
    file.seek(start)
    last_line = _read_line(file)
    if not last_line:
        return None
    whole = without_zeros(last_line)
    if start + len(last_line) < size:
        raise no_records(path, where="its end", line=last_line)
    if parse_record(whole) is not None:
        file.truncate(start + len(whole))
        file.write(b"\n")
        repair = "completed"
    elif is_torn(last_line):
        file.truncate(start)
        repair = "dropped"
    else:
        raise no_records(path, where="its end", line=last_line)
    os.fsync(file.fileno())
    return repair


def _read_line(file: BinaryIO) -> bytes:
    """A line, or so much of it that it is too long for a record. `readline` of an unbuffered file goes byte by byte."""
    line = bytearray()
    while b"\n" not in line[-65536:] and len(line) <= MAX_RECORD_BYTES and (more := file.read(65536)):
        line += more
    end = line.find(b"\n")
    return bytes(line[: end + 1] if end >= 0 else line)


def _start_of_last_line(file: BinaryIO) -> int:
    """Offset just behind the last line feed, sought from the end: the file may be large, its last line is not."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = file.seek(max(0, end - 65536))
        position = file.read(end - start).rfind(b"\n")
        if position >= 0:
            return start + position + 1
        end = start
    return 0
