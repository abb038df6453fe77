"""Files that are there whole or not at all: written beside their place, and put there when they are complete."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
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
