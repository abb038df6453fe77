"""Reads a folder of several files as one version of it, though another process may replace the folder meanwhile."""

import functools
import os
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from llama_adapter.runtime.errors import CheckpointError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Folder = str | os.PathLike[str]


def again_if_replaced(read: Callable[Concatenate[_Folder, _P], _R]) -> Callable[Concatenate[_Folder, _P], _R]:
    """A reader of a folder that begins again where the folder is another one at its end.

    So a result has no files of two versions, and neither is an error about such a mixture.
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
    """What differs between a folder and one that is renamed to its place; empty if there is none."""
    try:
        status = os.stat(directory)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_ctime_ns  # the number of a removed folder may come again
