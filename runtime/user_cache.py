"""The user's cache folder, for files that this program creates for its own use."""

import atexit
import os
import shutil
import stat
import tempfile
from pathlib import Path

_VARIABLE = "XDG_CACHE_HOME"
_PREFIX = "llama-adapter-cache-"
_fault = ""  # why `working_cache` is a temporary folder


def cache_folder() -> Path:
    """The user's cache folder, `$XDG_CACHE_HOME/llama-adapter` or `~/.cache/llama-adapter`; created if missing.

    As its specification asks, a relative XDG_CACHE_HOME is ignored. The folder contains libraries that are executed.
    Therefore OSError is raised if it cannot be created, belongs to another user, or is writable by others.
    """
    base = os.environ.get(_VARIABLE, "")
    try:
        folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "llama-adapter"
    except RuntimeError as error:  # a container's user without an entry in passwd
        raise FileNotFoundError("this user has no home folder: set XDG_CACHE_HOME") from error
    try:
        for place in (folder.parent, folder):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
        raise type(error)(f"`{file}` is not a folder: move it, or set XDG_CACHE_HOME") from None
    except OSError as error:
        raise type(error)(f"`{folder}` cannot be made ({error.strerror}): set XDG_CACHE_HOME") from None
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise PermissionError(f"`{folder}` belongs to another user: chown it, or set XDG_CACHE_HOME")
    if status.st_mode & 0o022:
        raise PermissionError(f"others may write to `{folder}`: chmod go-w it, or set XDG_CACHE_HOME")
    return folder


def working_cache() -> Path:
    """The cache folder; if there is none, a temporary one, which this process removes when it ends.

    Processes that this one starts use the same folder. Raises OSError if there is no temporary folder either.
    """
    global _fault
    try:
        return cache_folder()
    except OSError as error:
        base = Path(tempfile.mkdtemp(prefix=_PREFIX))
        _fault = str(error)
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(base, ignore_errors=True) if os.getpid() == owner else None)
    os.environ[_VARIABLE] = str(base)
    return cache_folder()


def cache_fault() -> str:
    """Why `working_cache` made a temporary folder in this process; "" if it did not."""
    return _fault


def cache_note() -> str:
    """A note for the user on `cache_fault`; "" without one."""
    return _fault and f"compiled kernels are kept for this run only: {_fault}"


def is_temporary() -> bool:
    """Whether `working_cache` is a temporary folder."""
    return Path(os.environ.get(_VARIABLE, "")).name.startswith(_PREFIX)


def read_own(path: Path) -> bytes:
    """The content of a file of the cache that is executed, such as a compiled library.

    Raises OSError if it cannot be read, and PermissionError unless it is a regular file of this user or root that
    others cannot write. The open file is checked. It keeps its name, because only this user writes to the folder.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
            raise PermissionError(f"`{path}` is not a regular file of this user that others cannot write")
        return file.read()
