"""Appending to a file of answers so that no crash, full disk or second writer costs what is in it."""

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from app.records.record import Record, RecordFileError, no_records, parse_record, record_to_line

_SYNC_S = 2.0


class RecordFileLockedError(RecordFileError):
    """Another run writes into the file."""


class RecordWriter:
    """Appends records to a file; what was written before survives a crash.

    Opening takes a lock that two writers cannot have at once (flock: gone with the process that has it, however that
    ends), and repairs a last line that a crash left torn: a whole record gets its line feed (`repair` is "completed"),
    anything less is cut off ("dropped"). Every record reaches the operating system at once, so it survives the death of
    this process; the disk is told to keep them (fsync) after every `sync_every` records, after two seconds, and at the
    end, and with the first of them the file's name. A record that cannot be written whole, as on a full disk, is taken
    back. Pipes and devices such as /dev/stdout are written to without lock, repair or fsync. A file is made at once, so
    that a place that cannot be written shows; if it is still empty at the end, it is removed again.

    Raises `RecordFileLockedError` when another process has the file, `RecordFileError` when it holds something else
    than records, which is then left alone, and OSError when it cannot be written.
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
            if self.is_durable and len(rest) < len(line):
                self._file.truncate(self._end)  # half a line is nothing to anybody; a full disk takes this
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.num_written += 1
        if self.is_durable:
            self._end += len(line)
            self._num_unsynced += 1
            if self._num_unsynced >= self._sync_every or time.monotonic() - self._synced_at >= _SYNC_S:
                self._sync()

    def clear(self) -> None:
        """Throw away what the file holds, to begin anew."""
        if self.is_durable:
            self._file.truncate(0)
            self._end = 0

    def close(self) -> None:
        """Make everything written durable and close the file; further calls do nothing."""
        if self._file.closed:
            return
        try:
            if self.is_durable:
                self._sync()
            if self._is_new and self.is_durable and self._end == 0:
                self.path.unlink(missing_ok=True)  # before the lock goes: nobody has begun to write into it
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

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        if not self._is_name_synced:
            _sync_folder(self.path.parent)
            self._is_name_synced = True
        self._num_unsynced, self._synced_at = 0, time.monotonic()


def _sync_folder(folder: Path) -> None:
    """Have the disk keep the names in a folder, where its file system can be told so."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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
    """Give the file whole lines again; says what was done to the last one, None where nothing was wrong."""
    if file.seek(0, os.SEEK_END) == 0:
        return None
    file.seek(0)
    first_line = _read_line(file)
    # Cutting off a line is only right in a file of ours: a picture named by mistake must not lose its tail.
    is_ours = parse_record(first_line) is not None if first_line.endswith(b"\n") else _is_torn_record(first_line)
    if not is_ours:
        raise no_records(path, where="line 1")
    start = _start_of_last_line(file)
    file.seek(start)
    last_line = file.read()
    if not last_line:
        return None
    if parse_record(last_line) is not None:
        file.write(b"\n")
        repair = "completed"
    else:
        file.truncate(start)
        repair = "dropped"
    os.fsync(file.fileno())
    return repair


def _read_line(file: BinaryIO) -> bytes:
    """`readline` of an unbuffered file asks for every byte by itself."""
    line = b""
    while b"\n" not in line and (more := file.read(65536)):
        line += more
    return line[: line.index(b"\n") + 1] if b"\n" in line else line


def _is_torn_record(line: bytes) -> bool:
    beginning = b'{"id": "'
    return line.startswith(beginning[: len(line)]) if len(line) < len(beginning) else line.startswith(beginning)


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
