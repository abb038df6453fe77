"""Files and folders: the pictures in a folder, in natural order. Opens no picture."""

import os
from collections.abc import Iterable, Iterator

from llama_adapter.app.inputs.items import PictureInput
from llama_adapter.app.inputs.natural import natural_key
from llama_adapter.vision.formats import PHONE_SUFFIXES, PICTURE_SUFFIXES


def expand_inputs(paths: Iterable[str | os.PathLike[str]], *, recursive: bool = False) -> Iterator[PictureInput]:
    """Files as they are named, folders as the pictures in them; every named path gives at least one item.

    A file may have any suffix. Of a folder, files with a suffix of `PICTURE_SUFFIXES` or `PHONE_SUFFIXES` in any case
    count, in natural order (pic_2 before pic_10), without hidden ones; `recursive` descends into its folders, but not
    through links.
    A path that does not exist, and a folder that cannot be listed or has no pictures, stays one item: loading it
    gives the `PictureError` that belongs to it, so a batch never stops here and nothing is skipped in silence.
    """
    for path in paths:
        name = os.fspath(path)
        if os.path.isdir(name):
            yield from folder_inputs(name, recursive=recursive)
        else:
            yield file_input(name)


def file_input(path: str, *, root: str | None = None, found_in: tuple[str, ...] = ()) -> PictureInput:
    """A file, there or not, as one picture."""
    return PictureInput(source=path, label=path, root=root, found_in=found_in)


def folder_inputs(folder: str, *, recursive: bool) -> Iterator[PictureInput]:
    """The pictures in a folder; the folder itself when it has none."""
    found_any = False
    for picture, folders in _pictures_below(folder, recursive=recursive):
        found_any = True
        yield file_input(picture, root=folder, found_in=folders)
    if not found_any:
        yield file_input(folder, root=folder)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle
        return False


def has_picture_suffix(name: str) -> bool:
    """Whether a name is taken for a picture's where pictures are searched for."""
    return os.path.splitext(name)[1].lower() in PICTURE_SUFFIXES | PHONE_SUFFIXES


def _pictures_below(folder: str, *, recursive: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Paths of pictures, each with the labels of the folders that were listed to find it."""
    open_listings: list[tuple[Iterator[tuple[str, bool]], tuple[str, ...]]]
    open_listings = [(_listing(folder, recursive=recursive), (folder,))]
    while open_listings:
        listing, folders = open_listings[-1]
        for path, is_listed_too in listing:
            if is_listed_too:
                open_listings.append((_listing(path, recursive=True), (*folders, path)))
                break
            # A folder that cannot be listed is given itself.
            yield path, folders if path != folders[-1] else folders[:-1]
        else:
            open_listings.pop()


def _listing(folder: str, *, recursive: bool) -> Iterator[tuple[str, bool]]:
    """Paths of the pictures in a folder and, when they count, of its folders, which are marked."""
    names: list[str] = []  # a folder may have millions: its other files are not kept
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
    except OSError:  # not ours to list: the folder itself becomes the item, whose loading says why
        yield folder, False
        return
    names.sort(key=natural_key)
    for name in names:
        yield os.path.join(folder, name), name in folders
