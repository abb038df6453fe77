"""Writes files and folders completely or not at all: under a temporary name in the same folder, then renamed."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.partial import create_partial, named_after, remove_leftovers


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file to write to, which replaces `path` when the context ends. After an error, `path` is unchanged.

    Missing folders are created, and what killed processes left in the folder is removed. Pipes and devices such as
    /dev/stdout are written to directly. Raises OSError, which names a file also if a write fails.
    """
    place = _place(path)
    if place is None:
        with named_after(path), open(path, "wb") as stream:
            yield stream
        return
    remove_leftovers(place.parent)
    with named_after(path):
        file = create_partial(place)
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, place)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(file.name)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace a file by a text, as `atomic_write` does. What UTF-8 lacks is written as escapes."""
    with atomic_write(path) as file:
        file.write(text.encode(errors="backslashreplace"))


def require_place(path: str | os.PathLike[str]) -> None:
    """Raise OSError if `atomic_write` cannot write to `path`, before long work. Missing folders are created."""
    place = _place(path)
    if place is not None:
        with named_after(path), create_partial(place) as trial:
            os.unlink(trial.name)


def _place(path: str | os.PathLike[str]) -> Path | None:
    """The file that is written, the target of a link, in a folder that exists now; None for a pipe or a device."""
    place = Path(path)
    if place.exists() and not place.is_file() and not place.is_dir():
        return None
    place = Path(os.path.realpath(place))
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir():
        raise IsADirectoryError(0, "A file is to be written here, and it is a folder", str(path))
    return place


def sync_folder(folder: Path) -> None:
    """Sync the file names in a folder to disk, if its file system supports that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def refuse_to_replace(paths: Sequence[Path], *, force: bool, other: str = ", or name another one as --out") -> None:
    """Raise UsageError if one of the paths exists, unless `force`. `other` is the end of the hint."""
    there = [path for path in paths if path.exists()]
    if there and not force:
        raise UsageError(f"`{there[0]}` exists already", hint=f"replace it with --force{other}")


def replace_folder(partial: Path, target: Path) -> None:
    """Rename the folder `partial` to `target`. An existing `target` is removed after the new folder has its name.

    If several processes replace `target` at the same time, the last one wins. Raises OSError.
    """
    while not _take_place(partial, target):
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
        try:
            os.replace(target, old)  # onto an empty folder
        except FileNotFoundError:  # another process has moved it
            old.rmdir()
            continue
        except BaseException:
            old.rmdir()
            raise
        try:
            is_in_place = _take_place(partial, target)
        except BaseException:
            os.replace(old, target)
            raise
        shutil.rmtree(old)
        if is_in_place:
            return


def _take_place(partial: Path, target: Path) -> bool:
    """Rename a folder if `target` does not exist or is an empty folder. Return False if `target` is not empty."""
    try:
        os.replace(partial, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True
