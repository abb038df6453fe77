"""Files and folders: the pictures in a folder, in natural order."""

import os
import re
from collections.abc import Container, Iterator
from itertools import islice

from llama_adapter.app.pictures.inputs.items import LeftOut, PictureInput
from llama_adapter.vision.formats import PHONE_SUFFIXES, PICTURE_SUFFIXES

_THUMBNAILS = frozenset(  # folders of NAS systems and of archives that macOS made, in lower case
    (
        *("@eadir", "#recycle", "@recycle", "#snapshot", "@recently-snapshot", "@__thumb", "@tmp"),
        *("$recycle.bin", "lost+found", "__macosx"),
    )
)
_RUNS = re.compile(r"[0-9]+|[^0-9]+")


def file_input(path: str, *, root: str | None = None, found_in: tuple[str, ...] = ()) -> PictureInput:
    """The item of a file, which need not exist."""
    return PictureInput(source=path, label=path, root=root, found_in=found_in)


def folder_inputs(folder: str, *, recursive: bool, left_out: LeftOut | None = None) -> Iterator[PictureInput]:
    """The pictures in a folder, in natural order (pic_2 before pic_10). `recursive` descends, but follows no links.

    Files with a suffix of `PICTURE_SUFFIXES` or `PHONE_SUFFIXES` are pictures; case is ignored, and hidden files are
    left out. If there are none, or the folder cannot be listed, it is itself the only item: reading it gives the error,
    so that a job neither stops nor skips it silently. Folders of thumbnails are not searched; `left_out` counts them.
    """
    found_any, left_out = False, LeftOut() if left_out is None else left_out
    for picture, folders in _pictures_below(folder, recursive=recursive, left_out=left_out):
        found_any = True
        yield file_input(picture, root=folder, found_in=folders)
    if not found_any:
        yield file_input(folder, root=folder)


def count_in_sub_folders(folder: str, *, searched: Container[str], at_most: int) -> int:
    """The number of pictures that `recursive` would add to a folder.

    Pictures in folders that were `searched` themselves are not counted. Counting ends at `at_most`.
    """
    ignored = LeftOut()
    below = (path for path, is_sub in _listing(folder, recursive=True, left_out=ignored) if is_sub)
    pictures = (picture for path in below for picture, _ in _pictures_below(path, recursive=True, left_out=ignored))
    return sum(1 for _ in islice((name for name in pictures if os.path.dirname(name) not in searched), at_most))


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a circular link
        return False


def is_thumbnail_folder(name: str) -> bool:
    """Whether a system keeps thumbnails, deleted files or metadata in folders of this name."""
    return name.lower() in _THUMBNAILS


def has_picture_suffix(name: str) -> bool:
    """Whether a file counts as a picture when folders, patterns and archives are searched."""
    return os.path.splitext(name)[1].lower() in PICTURE_SUFFIXES | PHONE_SUFFIXES


def _pictures_below(folder: str, *, recursive: bool, left_out: LeftOut) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Paths of pictures, each with the chain of folders that contain it."""
    open_listings: list[tuple[Iterator[tuple[str, bool]], tuple[str, ...]]]
    open_listings = [(_listing(folder, recursive=recursive, left_out=left_out), (folder,))]
    while open_listings:
        listing, folders = open_listings[-1]
        for path, is_listed_too in listing:
            if is_listed_too:
                open_listings.append((_listing(path, recursive=True, left_out=left_out), (*folders, path)))
                break
            # For a folder that cannot be listed, the folder's own path is yielded.
            yield path, folders if path != folders[-1] else folders[:-1]
        else:
            open_listings.pop()


def _listing(folder: str, *, recursive: bool, left_out: LeftOut) -> Iterator[tuple[str, bool]]:
    """Paths of the pictures in a folder, marked False, and, if `recursive`, of its sub-folders, marked True."""
    names: list[str] = []  # only of pictures and folders, because a folder may have millions of other files
    folders: set[str] = set()
    try:
        with os.scandir(folder) as listing:
            for entry in listing:
                if entry.name.startswith("."):
                    continue
                if is_folder(entry):
                    if recursive and is_thumbnail_folder(entry.name):
                        left_out.add("folders of thumbnails", entry.path)
                    elif recursive and not entry.is_symlink():
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
    """Sort key that compares runs of digits as numbers and ignores the case of letters; the name itself breaks ties.

    The key is a single string to save memory, as a folder may have millions of names. A number becomes a null
    character, its length and its digits. Two null characters end the name.
    """
    return f"{_RUNS.sub(_comparable, name)}\0\0{name}"


def _comparable(run: re.Match[str]) -> str:
    text = run[0]
    if text[0] not in "0123456789":
        return text.casefold()
    digits = text.lstrip("0")
    return f"\0{chr(len(digits) + 1)}{digits}"
