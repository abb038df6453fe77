"""Files that clients upload and batches write, kept in a private folder, within limits."""

import dataclasses
import json
import logging
import os
import stat
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Final, Generic, Literal, Self, TypeVar

import pydantic

from llama_adapter.app.serving.http_api.errors import ApiError
from llama_adapter.runtime.atomic_write import atomic_write, sync_folder
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.given import require_least
from llama_adapter.runtime.locking import take_lock
from llama_adapter.runtime.text import shown_excerpt, shown_name

MAX_NAME_CHARS = 255
MAX_STATE_BYTES: Final = 2**20  # of a JSON file in the folder; those that the server writes have a tenth of it
_PRIVATE = 0o600
_log = logging.getLogger("llama_adapter.server")

Purpose = Literal["batch", "batch_output"]
FileId = Annotated[str, pydantic.Field(pattern="^file-[0-9a-f]{32}(-output|-errors)?$")]
Time = Annotated[float, pydantic.Field(ge=0, le=1e11, allow_inf_nan=False)]  # seconds since 1970
Kind = TypeVar("Kind", bound="Owned")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileLimits:
    """Limits of stored files. Raises ValueError for values that are not positive."""

    max_file_bytes: int = 200 * 2**20  # size of an uploaded file
    max_files: int = 1000  # with this many files, uploads are refused
    max_total_bytes: int = 4 * 2**30  # all files, and the answers of unfinished batches

    def __post_init__(self) -> None:
        require_least(self, *(field.name for field in dataclasses.fields(self)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Owned:
    """What the objects in the JSON files of a folder have in common."""

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")

    id: str
    owner: str | None  # the API key that may see it; None: the server required no key
    created_at: Time


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile(Owned):
    """The description of a stored file."""

    id: FileId
    name: str  # from the client; never used as a path
    purpose: Purpose
    num_bytes: int


class ObjectFolder(Generic[Kind]):
    """The objects in the JSON files of a private folder; an object's `id` is its file's name. Thread-safe."""

    def __init__(self, folder: Path, kind: type[Kind], *, noun: Literal["file", "batch"], names: str) -> None:
        """`names` is the pattern of the files' names. A damaged file is left alone, and the log names it."""
        self.lock = threading.RLock()  # guards the objects
        self._folder, self._noun, self._type = folder, noun, pydantic.TypeAdapter(kind)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        read = [one for path in folder.glob(names) if (one := self._read(path)) is not None]
        self._objects = {one.id: one for one in sorted(read, key=lambda one: (one.created_at, one.id))}

    def find(self, object_id: str, *, owner: str | None) -> Kind:
        """An object that `owner` may see; raises ApiError."""
        found = self._objects.get(object_id)
        if found is None or owner not in (None, found.owner):
            noun = self._noun
            raise ApiError(f"No such {noun}.", status=404, code=f"{noun}_not_found", param=f"{noun}_id")
        return found

    def all(self, *, owner: str | None) -> list[Kind]:
        """The objects that `owner` may see, oldest first."""
        with self.lock:
            return [one for one in self._objects.values() if owner in (None, one.owner)]

    def _about(self, object_id: str) -> Path:
        return self._folder / f"{object_id}.json"

    def _write(self, one: Kind) -> Kind | None:
        """Set an object on disk and in memory; returns the one that it replaces."""
        with atomic_write(self._about(one.id)) as file:
            os.fchmod(file.fileno(), _PRIVATE)
            file.write(json.dumps(dataclasses.asdict(one)).encode())
        sync_folder(self._folder)
        with self.lock:
            replaced = self._objects.get(one.id)
            self._objects[one.id] = one
        return replaced

    def _read(self, path: Path, *others: Path) -> Kind | None:
        """The object in a JSON file. None, and a line in the log, if this or one of the others is no regular file."""
        try:
            if not all(file.is_file() for file in (path, *others)) or path.stat().st_size > MAX_STATE_BYTES:
                raise ValueError("it is no file of the server")
            one = self._type.validate_json(path.read_bytes(), strict=True)
            if one.id != path.stem:
                raise ValueError("it has the id of another file")
            return one
        except pydantic.ValidationError as error:  # its text quotes the file, which the log may not
            first = error.errors(include_input=False, include_url=False)[0]
            fault = ": ".join([*map(str, first["loc"][:1]), first["msg"]])
        except (ValueError, OSError) as error:
            fault = getattr(error, "strerror", None) or str(error)
        _log.error("%s is left out: %s", shown_name(str(path)), shown_excerpt(fault))
        return None


class FileStore(ObjectFolder[StoredFile]):
    """A folder of files. Thread-safe. Only one process at a time can open it.

    The store chooses an id for every file, which is its name on disk. A JSON file next to it holds its `StoredFile`. A
    file without this JSON file is incomplete, and is removed when the store is opened. If the JSON file is damaged,
    both are left alone.
    """

    def __init__(self, folder: Path, *, limits: FileLimits) -> None:
        """Raises UsageError if other users can read the folder or another server uses it, and OSError."""
        self.limits = limits
        self._held = _open_private(folder)
        super().__init__(folder / "files", StoredFile, noun="file", names="file-*.json")
        self._num_bytes = sum(file.num_bytes for file in self._objects.values())
        for path in self._folder.iterdir():
            file_id = path.name.removesuffix(".json")
            is_pair = self.path(file_id).exists() and self._about(file_id).exists()
            if file_id not in self._objects and not is_pair and path.name.lstrip(".").startswith("file-"):
                # Either an upload that a crash interrupted, or a description alone.
                remove(path, reason="the file that it describes is gone" if path.suffix == ".json" else None)

    def close(self) -> None:
        """Let other processes use the folder."""
        self._held.close()

    def path(self, file_id: str) -> Path:
        """The path of a file's content."""
        return self._folder / file_id

    def remove(self, file_id: str) -> None:
        """Delete a file of the store."""
        with self.lock:
            self._num_bytes -= self._objects.pop(file_id).num_bytes
            self._about(file_id).unlink(missing_ok=True)
            self.path(file_id).unlink(missing_ok=True)

    def upload(self, *, owner: str | None) -> "NewFile":
        """A new file of a client; raises ApiError if the store has too many files."""
        if len(self._objects) >= self.limits.max_files:
            message = f"The server keeps {self.limits.max_files:,} files, which is its limit: delete some."
            raise ApiError(message, status=413, code="too_many_files")
        return NewFile(self, f"file-{uuid.uuid4().hex}", owner=owner, max_bytes=self.limits.max_file_bytes)

    def output(self, file_id: str, *, owner: str | None) -> "NewFile":
        """A new file of a batch, whose room `take_room` has already counted. It replaces a file with the same id."""
        return NewFile(self, file_id, owner=owner, max_bytes=None)

    def take_room(self, num_bytes: int, *, is_forced: bool = False) -> None:
        """Count bytes that are about to be written; raises ApiError beyond the limit, unless forced."""
        with self.lock:
            if not is_forced and self._num_bytes + num_bytes > self.limits.max_total_bytes:
                message = f"The server's files have {self.limits.max_total_bytes:,} bytes, the limit: delete some."
                raise ApiError(message, status=413, code="storage_full")
            self._num_bytes += num_bytes

    def give_room(self, num_bytes: int) -> None:
        """Undo `take_room`."""
        with self.lock:
            self._num_bytes -= num_bytes

    def keep(self, file: StoredFile) -> None:
        """Add a file to the store. Its content is already in place and counted."""
        if (replaced := self._write(file)) is not None:
            self.give_room(replaced.num_bytes)

    def _read(self, path: Path, *others: Path) -> StoredFile | None:
        content = path.with_suffix("")
        if not content.exists():
            return None  # it is removed when the store is opened
        file = super()._read(path, content, *others)
        return None if file is None else dataclasses.replace(file, num_bytes=content.stat().st_size)


def remove(path: Path, *, reason: str | None = None) -> None:
    """Delete a file of an earlier run, if it is there. What cannot be deleted is logged, and stays.

    With a reason, the removal is logged too.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.error("%s stays: %s", shown_name(str(path)), error.strerror)
    else:
        if reason is not None:
            _log.error("%s is removed: %s", shown_name(str(path)), reason)


class NewFile:
    """A file that is being written. It is removed when the block ends, unless it was kept."""

    def __init__(self, store: FileStore, file_id: str, *, owner: str | None, max_bytes: int | None) -> None:
        """If `max_bytes` is None, neither the size of this file nor the store's total is checked."""
        self.num_bytes = 0
        self._store, self._id, self._owner, self._max_bytes = store, file_id, owner, max_bytes
        self._is_kept = False
        self._path = store.path(f".{file_id}.partial")

    def __enter__(self) -> Self:
        self._file: BinaryIO = open_private(self._path, "wb")
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_kept:
            self._store.give_room(self.num_bytes)
            self._path.unlink(missing_ok=True)
        self._file.close()  # raises on a full disk, so it comes last

    def write(self, data: bytes) -> None:
        """Append bytes; raises ApiError if a limit is exceeded, and OSError."""
        if self._max_bytes is not None and self.num_bytes + len(data) > self._max_bytes:
            message = f"The file is larger than {self._max_bytes:,} bytes."
            raise ApiError(message, status=413, code="file_too_large", param="file")
        self._store.take_room(len(data), is_forced=self._max_bytes is None)
        self.num_bytes += len(data)
        self._file.write(data)

    def keep(self, *, name: str, purpose: Purpose) -> StoredFile:
        """Sync the complete file to disk and add it to the store, so that it survives a crash."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._path = self._path.replace(self._store.path(self._id))
        file = StoredFile(
            id=self._id,
            name=name[:MAX_NAME_CHARS],
            purpose=purpose,
            num_bytes=self.num_bytes,
            created_at=time.time(),
            owner=self._owner,
        )
        self._store.keep(file)
        self._is_kept = True
        return file


def open_private(path: Path, mode: str) -> BinaryIO:
    """Open a file; a new file is readable by this user only."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, _PRIVATE))  # type: ignore[return-value]


def _open_private(folder: Path) -> BinaryIO:
    """Create the folder if it is missing; returns its lock file, locked."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        raise UsageError(f"The folder `{folder}` is open to other users", hint=f"chmod 700 {folder}")
    lock = open_private(folder / "lock", "ab")
    try:
        take_lock(lock)
    except BlockingIOError:
        lock.close()
        raise UsageError(f"Another server keeps its files in `{folder}`", hint="name another folder") from None
    return lock
