"""A folder of record files in the place of one: each up to so many records, the last one growing. One writer."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

from llama_adapter.app.records.file import FileLock, RecordWriter
from llama_adapter.app.records.loss import RecordFileLostError
from llama_adapter.app.records.manifest import read_manifest
from llama_adapter.app.records.record import PART_NAME, Record

RECORDS_IN_A_PART: Final = 100_000
_LOCK_NAME: Final = ".lock"


class RecordStore(Protocol):
    """Where a job's records go: a file, or a folder of them."""

    @property
    def path(self) -> Path: ...

    @property
    def files(self) -> tuple[Path, ...]:
        """What earlier runs wrote, in order; none where that is gone once it is written, as through a pipe."""
        ...

    @property
    def is_durable(self) -> bool:
        """Whether what is written can be read again."""
        ...

    @property
    def is_locked(self) -> bool:
        """Whether no other writer can come; some file systems have no locks."""
        ...

    @property
    def repair(self) -> str | None:
        """What opening did to a last line without a line feed: "completed", "dropped", or None."""
        ...

    def write(self, record: Record) -> None: ...
    def sync(self) -> None: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_records(out: str) -> RecordStore:
    """A folder where `out` is one or ends with a slash, else a file.

    Raises as both do, and as `read_manifest`, before a run has thrown anything away.
    """
    is_folder = out.endswith(("/", os.sep)) or os.path.isdir(out)
    store = RecordFolder(out) if is_folder else RecordWriter(out)
    try:
        if store.is_durable:
            read_manifest(store.path)
    except BaseException:
        store.close()
        raise
    return store


class RecordFolder:
    """Files part-00000.jsonl and so on, each as `RecordWriter` writes it; a part that is full is never touched again.

    The folder is locked as a file of records is. Raises as `RecordWriter` does.
    """

    is_durable = True

    def __init__(self, path: str | os.PathLike[str], *, records_in_a_part: int = RECORDS_IN_A_PART) -> None:
        if records_in_a_part < 1:
            raise ValueError(f"records_in_a_part must be at least 1, got {records_in_a_part}")
        self.path = Path(path)
        self._records_in_a_part = records_in_a_part
        self._is_new = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.path / _LOCK_NAME, what=self.path)
        try:
            parts = self._parts()
            self._number = max(parts, default=0)
            self._part = RecordWriter(self._path_of(self._number))
            self._num_in_part = _count_lines(self._part.path)
            self._full = {path for number, path in parts.items() if number != self._number}
        except BaseException:
            self._lock.close()
            raise

    @property
    def is_locked(self) -> bool:
        """Whether no other writer can come."""
        return self._lock.is_locked

    @property
    def files(self) -> tuple[Path, ...]:
        """Its parts, in order."""
        return tuple(path for _, path in sorted(self._parts().items()))

    @property
    def repair(self) -> str | None:
        """What was done to the last line of the last part, as `RecordWriter` has it."""
        return self._part.repair

    def sync(self) -> None:
        """Make everything written durable. Raises `RecordFileLostError` where the growing part is not in its place."""
        with self._telling_of_full_parts():
            self._part.sync()

    def write(self, record: Record) -> None:
        """Append one record."""
        with self._telling_of_full_parts():
            if self._num_in_part >= self._records_in_a_part:
                self._part.close()
                self._full.add(self._part.path)
                self._number += 1
                self._part, self._num_in_part = RecordWriter(self._path_of(self._number)), 0
            self._part.write(record)
        self._num_in_part += 1

    def clear(self) -> None:
        """Throw away what the parts hold, to begin anew."""
        self._part.close()
        for path in self.files:
            with RecordWriter(path) as part:  # refuses what is no file of records
                part.clear()
            path.unlink(missing_ok=True)
        self._number, self._num_in_part = 0, 0
        self._full.clear()
        self._part = RecordWriter(self._path_of(0))

    def close(self) -> None:
        """Make everything written durable; further calls do nothing."""
        try:
            with self._telling_of_full_parts():
                self._part.close()
            if self._is_new and not self._parts():
                with suppress(OSError):  # somebody has put something else there
                    (self.path / _LOCK_NAME).unlink(missing_ok=True)
                    self.path.rmdir()
                self._is_new = False
        finally:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _telling_of_full_parts(self) -> Iterator[None]:
        """An error about a growing part that was removed says which full parts are gone with it, too."""
        try:
            yield
        except RecordFileLostError as error:
            num_gone = sum(not path.exists() for path in self._full)
            if not error.is_removed or not num_gone:
                raise
            raise RecordFileLostError(
                f"{error.message}. The full parts before it are gone too and are not rescued: {num_gone:,} of up to "
                f"{self._records_in_a_part:,} records each. A further run asks again what they held",
                hint=error.hint,
                is_removed=True,
            ) from None

    def _path_of(self, number: int) -> Path:
        return self.path / f"part-{number:05d}.jsonl"

    def _parts(self) -> dict[int, Path]:
        if not self.path.is_dir():
            return {}
        found = ((PART_NAME.fullmatch(path.name), path) for path in self.path.iterdir())
        return {int(match[1]): path for match, path in found if match is not None}


def _count_lines(path: Path) -> int:
    with open(path, "rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(2**20), b""))
