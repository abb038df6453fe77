"""Files that are there whole or not at all: written beside their place, and put there when they are complete."""

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from llama_adapter.runtime.errors import UsageError


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` at the end; after an error, all is as it was.

    Folders on the way are made. What is no regular file, such as a pipe or /dev/stdout, is written to directly. Raises
    OSError.
    """
    place = Path(path)
    if place.exists() and not place.is_file() and not place.is_dir():
        with open(place, "wb") as stream:
            yield stream
        return
    place = Path(os.path.realpath(place))  # of a link, the file that it names is replaced
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir():
        raise IsADirectoryError(0, "Wanted a place for a file, and it is a folder", str(path))
    beside = place.with_name(f".{place.name[:100]}.{secrets.token_hex(4)}.partial")
    try:
        with open(beside, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, place)
    finally:
        with suppress(FileNotFoundError):
            beside.unlink()


def refuse_to_replace(paths: Sequence[Path], *, force: bool, other: str = ", or name another one as --out") -> None:
    """Raise UsageError for a file that is there already, unless by `force`."""
    there = [path for path in paths if path.exists()]
    if there and not force:
        raise UsageError(f"`{there[0]}` exists already", hint=f"replace it with --force{other}")
