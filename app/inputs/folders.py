"""Files and folders: the pictures in a folder, in natural order."""

import os
import re
from collections.abc import Container, Iterable, Iterator
from itertools import islice

from llama_adapter.app.inputs.items import PictureInput
from llama_adapter.vision.formats import PHONE_SUFFIXES, PICTURE_SUFFIXES

_RUNS = re.compile(r"[0-9]+|[^0-9]+")


def expand_inputs(paths: Iterable[str | os.PathLike[str]], *, recursive: bool = False) -> Iterator[PictureInput]:
    """Files as they are named, folders as the pictures in them; every path gives at least one item.

    Files may have any suffix. In folders, files with a suffix of `PICTURE_SUFFIXES` or `PHONE_SUFFIXES` count, in any
    case and in natural order (pic_2 before pic_10), except hidden ones; `recursive` descends into folders, but not
    through links. A missing path, and a folder that cannot be listed or has no pictures, stays one item: reading it
    gives the error, so that a job neither stops nor skips it silently.
    """
    for path in paths:
        name = os.fspath(path)
        if os.path.isdir(name):
            yield from folder_inputs(name, recursive=recursive)
        else:
            yield file_input(name)


def file_input(path: str, *, root: str | None = None, found_in: tuple[str, ...] = ()) -> PictureInput:
    """A file, existing or not, as one picture."""
    return PictureInput(source=path, label=path, root=root, found_in=found_in)


def folder_inputs(folder: str, *, recursive: bool) -> Iterator[PictureInput]:
    """The pictures in a folder; the folder itself if it has none."""
    found_any = False
    for picture, folders in _pictures_below(folder, recursive=recursive):
        found_any = True
        yield file_input(picture, root=folder, found_in=folders)
    if not found_any:
        yield file_input(folder, root=folder)


def count_in_sub_folders(folder: str, *, searched: Container[str], at_most: int) -> int:
    """How many pictures `recursive` would add to a folder, without those in folders that were `searched` themselves.

    Counting ends at `at_most`.
    """
    below = (path for path, is_sub in _listing(folder, recursive=True) if is_sub)
    pictures = (picture for path in below for picture, _ in _pictures_below(path, recursive=True))
    return sum(1 for _ in islice((name for name in pictures if os.path.dirname(name) not in searched), at_most))


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a circular link
        return False


def has_picture_suffix(name: str) -> bool:
    """Whether a file counts as a picture when folders, patterns and archives are searched."""
    return os.path.splitext(name)[1].lower() in PICTURE_SUFFIXES | PHONE_SUFFIXES


def _pictures_below(folder: str, *, recursive: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Paths of pictures, each with the folders that led to it."""
    open_listings: list[tuple[Iterator[tuple[str, bool]], tuple[str, ...]]]
    open_listings = [(_listing(folder, recursive=recursive), (folder,))]
    while open_listings:
        listing, folders = open_listings[-1]
        for path, is_listed_too in listing:
            if is_listed_too:
                open_listings.append((_listing(path, recursive=True), (*folders, path)))
                break
            # A folder that cannot be listed is yielded itself.
            yield path, folders if path != folders[-1] else folders[:-1]
        else:
            open_listings.pop()


def _listing(folder: str, *, recursive: bool) -> Iterator[tuple[str, bool]]:
    """Paths of the pictures in a folder and, if `recursive`, of its folders, which are marked True."""
    names: list[str] = []  # of millions of files, only pictures are kept
    folders: set[str] = set()
    try:
        with os.scandir(folder) as listing:
            for entry in listing:
                if entry.name.startswith("."):
                    continue
                if is_folder(entry):
                    if recursive and not entry.is_symlink():
                        folders.add(entry.name)
                        names.append(entry.name)
                elif has_picture_suffix(entry.name):
                    names.append(entry.name)
    except OSError:  # the folder itself becomes the item; reading it gives the error
        yield folder, False
        return
    names.sort(key=natural_key)
    for name in names:
        yield os.path.join(folder, name), name in folders


def natural_key(name: str) -> str:
    """Sort key that compares runs of digits as numbers and letters without case; the name itself breaks ties.

    The key is one string, as a folder may have millions of names. A number becomes a null character, its length and its
    digits; two null characters end the name.
    """
    return f"{_RUNS.sub(_comparable, name)}\0\0{name}"


def _comparable(run: re.Match[str]) -> str:
    text = run[0]
    if text[0] not in "0123456789":
        return text.casefold()
    digits = text.lstrip("0")
    return f"\0{chr(len(digits) + 1)}{digits}"
