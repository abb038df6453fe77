"""Reads a folder of several files consistently, even if another process replaces the folder meanwhile."""

import functools
import os
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from llama_adapter.runtime.errors import CheckpointError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Folder = str | os.PathLike[str]


def again_if_replaced(read: Callable[Concatenate[_Folder, _P], _R]) -> Callable[Concatenate[_Folder, _P], _R]:
    """Make a reader of a folder begin again if the folder was replaced while it was read.

    So neither a result nor an error comes from a mixture of two versions.
    """

    @functools.wraps(read)
    def read_one_version(directory: _Folder, /, *arguments: _P.args, **options: _P.kwargs) -> _R:
        while True:
            before = _version(directory)
            try:
                result = read(directory, *arguments, **options)
            except (CheckpointError, OSError):
                if _version(directory) == before:
                    raise
            else:
                if _version(directory) == before:
                    return result

    return read_one_version


def _version(directory: _Folder) -> tuple[int, ...]:
    """Values that change when another folder is renamed to this path; empty if there is no folder."""
    try:
        status = os.stat(directory)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_ctime_ns  # inode numbers of removed folders may be reused
