"""Files and folders under a temporary name, `.NAME.RANDOM.partial`, until they are complete and renamed.

Their process holds a lock on them. So what a killed process left is known, and later processes remove it.
"""

import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Final

_NAME: Final = re.compile(r"\..+\.[a-z0-9_]{8}\.partial", re.DOTALL)
_MOST_BYTES: Final = 100


def short_name(name: str) -> str:
    """A file's name, to which more can be added. A name of more than 100 bytes ends with a digest instead."""
    encoded = os.fsencode(name)
    if len(encoded) <= _MOST_BYTES:
        return name
    return encoded[:_MOST_BYTES].decode(errors="ignore") + hashlib.sha256(encoded).hexdigest()[:8]


def create_partial(place: str | Path, *, folder: int | None = None) -> BinaryIO:
    """Create a file that will be called `place`. Its `name` is its present path, in the folder of `place`.

    A relative `place` is below the open folder `folder`. The file holds the lock until it is closed. Raises OSError.
    """
    parent, name = os.path.split(place)
    while True:
        partial = os.path.join(parent, _partial_name(name))
        file = open(partial, "x+b", opener=lambda path, flags: os.open(path, flags, 0o666, dir_fd=folder))  # noqa: SIM115 - the caller closes it
        if _is_held(file.fileno()):
            return file
        file.close()


@contextmanager
def named_after(path: str | os.PathLike[str]) -> Iterator[None]:
    """An OSError in the context that names no file, as on a full disk, or a partial one, gets this file name."""
    try:
        yield
    except OSError as error:
        is_partial = any(map(_NAME.fullmatch, str(error.filename).split(os.sep)))
        if error.errno is not None and (error.filename is None or is_partial):
            error.filename = os.fspath(path)
        raise


@contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """A new folder beside `target`, with the mode of any new folder. It is removed at the end, if it was not renamed.

    What killed processes left in the same place is removed first. Raises OSError, which names `target`; `named_after`
    does so for errors in the context.
    """
    remove_leftovers(target.parent)
    with named_after(target):
        while True:
            partial = target.with_name(_partial_name(target.name))
            partial.mkdir()
            with suppress(FileNotFoundError):
                descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                if _is_held(descriptor):
                    break
                os.close(descriptor)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(descriptor)


def _partial_name(name: str) -> str:
    return f".{short_name(name)}.{secrets.token_hex(4)}.partial"


def _is_held(descriptor: int) -> bool:
    """Lock a new file or folder; False if another process took it for a leftover before that, and removed it."""
    with suppress(OSError):  # the file system has no locks: then nothing is taken for a leftover
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return os.fstat(descriptor).st_nlink > 0


@lru_cache(maxsize=1024)
def remove_leftovers(folder: Path) -> None:
    """Remove partial files and folders of processes that have ended from a folder, once in the life of this process."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            remove_leftovers_in(descriptor)
        finally:
            os.close(descriptor)


def remove_leftovers_in(folder: int) -> None:
    """Remove partial files and folders of processes that have ended from an open folder."""
    for name in filter(_NAME.fullmatch, os.listdir(folder)):
        with suppress(OSError):
            _remove(name, folder=folder)


def _remove(name: str, *, folder: int) -> None:
    """Remove a partial file or folder unless its process holds its lock, which raises BlockingIOError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.isdir(descriptor):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
    finally:
        os.close(descriptor)
