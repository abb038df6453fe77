"""What the user named, as work items: one per picture, in order. Opens no picture and imports no model."""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vision.formats import PICTURE_SUFFIXES, shown_name


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureInput:
    """One picture to answer for, whether or not it can be read."""

    source_path: str  # what to open; may hold undecodable bytes as surrogates
    label: str  # the same as printable text, for records and messages


def expand_inputs(paths: Iterable[str | os.PathLike[str]], *, recursive: bool = False) -> Iterator[PictureInput]:
    """Files as they are named, folders as the pictures in them; every named path gives at least one item.

    A file may have any suffix. Of a folder, files with a suffix of `PICTURE_SUFFIXES` in any case count, in natural
    order (pic_2 before pic_10), without hidden ones; `recursive` descends into its folders, but not through links.
    A path that does not exist, and a folder that cannot be listed or has no pictures, stays one item: loading it
    gives the `PictureError` that belongs to it, so a batch never stops here and nothing is skipped in silence.
    """
    for path in paths:
        name = os.fspath(path)
        found_any = False
        for picture in _pictures_below(name, recursive=recursive) if _is_folder(name) else ():
            found_any = True
            yield PictureInput(source_path=picture, label=shown_name(picture))
        if not found_any:
            yield PictureInput(source_path=name, label=shown_name(name))


def natural_key(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """Sort key that compares runs of digits as numbers and letters without case; the name itself breaks ties."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(0, int(part), "") if part[0] in "0123456789" else (1, 0, part.casefold()) for part in parts], name


def _is_folder(name: str) -> bool:
    try:
        return os.path.isdir(name)
    except ValueError:  # a null character in it
        return False


def _is_folder_entry(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle
        return False


def _pictures_below(folder: str, *, recursive: bool) -> Iterator[str]:
    try:
        with os.scandir(folder) as listing:
            entries = [entry for entry in listing if not entry.name.startswith(".")]
    except OSError:  # not ours to list: the folder itself becomes the item, whose loading says why
        yield folder
        return
    for entry in sorted(entries, key=lambda entry: natural_key(entry.name)):
        if _is_folder_entry(entry):
            if recursive and not entry.is_symlink():
                yield from _pictures_below(entry.path, recursive=True)
        elif os.path.splitext(entry.name)[1].lower() in PICTURE_SUFFIXES:
            yield entry.path
