"""An export as a folder of files with a given number of rows."""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.errors import UsageError

Row = TypeVar("Row")

_PART: Final = re.compile(r"part-\d{5,}\.[a-z]+")


def check_parts(folder: Path, *, force: bool) -> None:
    """Raise UsageError if `folder` is a file, or holds parts of an earlier export."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"Wanted a folder for parts, and `{folder}` is a file", hint="name a folder as --out")
    if not force and _old_parts(folder):
        raise UsageError(f"`{folder}` holds parts of an earlier export", hint="--force replaces them")


def write_parts(
    rows: Iterable[Row],
    folder: Path,
    *,
    suffix: str,
    rows_in_a_part: int,
    write: Callable[[Iterator[Row], BinaryIO], object],
) -> int:
    """Write part-00000.suffix and so on, each whole or not at all; returns their number.

    Other parts, of an earlier export, are removed at the end. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    old, written, rest = _old_parts(folder), set(), iter(rows)
    for number, first in enumerate(rest):
        part = folder / f"part-{number:05d}.{suffix}"
        with atomic_write(part) as file:
            write(chain([first], islice(rest, rows_in_a_part - 1)), file)
        written.add(part)
    for part in old - written:
        part.unlink(missing_ok=True)
    return len(written)


def _old_parts(folder: Path) -> set[Path]:
    return {path for path in folder.iterdir() if _PART.fullmatch(path.name)} if folder.is_dir() else set()
