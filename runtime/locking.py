"""Locks between processes (flock): one run at a time writes an output. A lock ends with its process."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from llama_adapter.runtime.errors import LlamaAdapterError
from llama_adapter.runtime.partial import short_name
from llama_adapter.runtime.text import shown_name

_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class OutputLockedError(LlamaAdapterError):
    """Another run writes the same output."""

    default_hint = "wait for it to end, stop it, or name another --out"


def take_lock(file: BinaryIO) -> bool:
    """Lock an open file for this process; False if its file system has no locks.

    Raises BlockingIOError if another process has the lock, and OSError.
    """
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def open_locked(path: Path) -> tuple[BinaryIO, bool]:
    """Open a file for reading and appending, without a buffer, and lock it; returns whether it is locked.

    If the last holder of the lock removes the file meanwhile, the path is opened again. Raises the errors of
    `take_lock`.
    """
    while True:
        file = open(path, "a+b", buffering=0)  # noqa: SIM115 - the caller closes it
        try:
            is_locked = take_lock(file)
            if not is_locked or os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file, is_locked
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()


@contextmanager
def locked_output(path: str | os.PathLike[str]) -> Iterator[None]:
    """Inside this context, another process that enters it with the same output is refused with OutputLockedError.

    The lock is a file `.NAME.lock` beside the output, or where the first missing folder of its path would be. It is
    removed at the end; the lock of a killed process does not count. Where no lock can be made, the context has no
    effect.
    """
    place = Path(os.path.realpath(path))
    folder = next(one for one in place.parents if one.is_dir())
    lock = folder / f".{short_name('-'.join(place.relative_to(folder).parts))}.lock"
    try:
        file, _ = open_locked(lock)
    except BlockingIOError:
        raise OutputLockedError(f"Another run is writing `{shown_name(path)}`") from None
    except OSError:  # the folder is read-only, for example, which the run itself reports
        yield
        return
    with file:
        try:
            yield
        finally:
            with suppress(OSError):
                lock.unlink()  # before the lock is released


@contextmanager
def awaited_lock(path: Path, *, waits: Callable[[], None]) -> Iterator[None]:
    """Inside this context, other processes wait that enter it with the same lock file, which stays.

    `waits` is called before this process waits. Where no lock can be made, the context has no effect. Raises OSError.
    """
    with open(path, "ab") as file:
        try:
            take_lock(file)
        except BlockingIOError:
            waits()
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        yield
