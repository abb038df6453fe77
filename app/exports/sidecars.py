"""Text files for pictures, next to them or in a folder. Picture names come from records and are not trusted."""

import errno
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Self

from llama_adapter.app.exports.formats import SidecarNames, safe_path
from llama_adapter.app.records.picture_names import place_of
from llama_adapter.runtime.partial import create_partial, remove_leftovers_in
from llama_adapter.runtime.text import shown_name

MAX_TOLD: Final = 10  # number of files that are named if they were not written
# Errors that concern one file or folder, unlike a full disk. Other files can still be written.
_OF_ONE_FILE: Final = {
    *(errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EEXIST),
    *(errno.EINVAL, errno.ENOENT),
}


class _RefusedError(Exception):
    """The reason why a text is not written."""


@dataclass(kw_only=True, slots=True)
class Refusals:
    """Pictures for which nothing was written, with reasons. All are counted; only the first `MAX_TOLD` are named."""

    count: int = 0
    told: list[str] = field(default_factory=list)

    def add(self, picture: str, why: str) -> None:
        """Count a picture, with the reason."""
        self.count += 1
        if len(self.told) < MAX_TOLD:
            self.told.append(f"{shown_name(picture)}: {why}")

    def lines(self) -> list[str]:
        """Lines for stderr."""
        more = self.count - len(self.told)
        return [f"error: {one}" for one in self.told] + ([f"error: and {more} more"] if more else [])


class SidecarFiles:
    """Writes one text file for each picture: `a/b.png` -> `a/b.txt`, or `a/b.png.txt` if that name is taken.

    Files are written under a temporary name and then renamed, so that a file is complete or missing. A file that has
    the text already is not touched. A file with other content is replaced only with `force`. Links are replaced, not
    followed.
    """

    def __init__(self, out: str | None, *, force: bool, below: Sequence[str] = ()) -> None:
        """With `out`, texts are written into this folder, by `safe_path`, without following links.

        With None, texts are written next to the pictures, but only for existing pictures that lie below one of the
        folders `below` after all links are resolved.
        """
        self.num_written = self.num_same = 0  # same: the file existed with this text
        self.refusals = Refusals()
        self.num_outside = 0  # number of pictures outside of all allowed folders
        self.outside: str | None = None  # the common folder of these pictures
        self._force, self._names, self._is_beside = force, SidecarNames(), out is None
        if out is not None:
            os.makedirs(out, exist_ok=True)
        self._roots = tuple(dict.fromkeys(map(os.path.realpath, below if out is None else [out])))
        self._folder: int | None = None  # descriptor of the folder written to last
        self._folder_name: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_folder()

    def see(self, picture: str) -> None:
        """Call it for every picture before the first `write`, so that no text gets the name of a folder."""
        self._names.avoid_folders_of(self._place(picture))

    def write(self, picture: str, text: str) -> None:
        """Write one text, or count it as refused. Raises OSError for errors that concern all files."""
        place = self._place(picture)
        try:
            if self._is_beside:
                self._check(place)
            folder, name = os.path.split(self._names.take(place))
            is_new = self._put(folder, name, text.encode(errors="backslashreplace") + b"\n")
        except _RefusedError as refusal:
            self.refusals.add(picture, str(refusal))
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in _OF_ONE_FILE:
                raise
            self.refusals.add(picture, getattr(error, "strerror", None) or str(error))
        else:
            self.num_written += is_new
            self.num_same += not is_new

    def _place(self, picture: str) -> str:
        if not self._is_beside:
            return os.path.join(self._roots[0], safe_path(picture))
        try:
            return place_of(picture)
        except ValueError:  # a null character in it
            return picture

    def _check(self, place: str) -> None:
        """Raise `_RefusedError` if no text may be written next to this picture."""
        folder = os.path.dirname(place)
        if _root_of(folder, self._roots) is None and os.path.isabs(folder):
            self.num_outside += 1
            self.outside = folder if self.outside is None else os.path.commonpath((self.outside, folder))
            raise _RefusedError("it is in no folder that texts may be written to; name its folder as --below")
        if not is_file(place):
            raise _RefusedError("there is no such picture; name a folder as --out for its text")

    def _put(self, folder: str, name: str, data: bytes) -> bool:
        """Write one file; returns False if it existed with this text already."""
        self._open_folder(folder)
        there = _content(name, self._folder, at_most=len(data))
        if there == data:
            return False
        if there is not None and not self._force:
            raise _RefusedError(f"`{name}` is there already with other content; replace it with --force")
        file = create_partial(name, folder=self._folder)
        try:
            with file:
                file.write(data)
            os.replace(file.name, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(file.name, dir_fd=self._folder)
        return True

    def _open_folder(self, name: str) -> None:
        if self._folder_name == name:
            return
        self._close_folder()
        root = _root_of(name, self._roots)
        assert root is not None, "only places below a root are written to"
        self._folder = _open_below(root, os.path.relpath(name, root), make=not self._is_beside)
        self._folder_name = name
        remove_leftovers_in(self._folder)

    def _close_folder(self) -> None:
        if self._folder is not None:
            os.close(self._folder)
        self._folder = self._folder_name = None


def _root_of(folder: str, roots: Iterable[str]) -> str | None:
    """The root that contains a folder; None if there is none."""
    return next((root for root in roots if folder == root or folder.startswith(root.rstrip("/") + "/")), None)


def _open_below(root: str, name: str, *, make: bool) -> int:
    """Open a folder below `root`, part by part and without following links. `make` creates missing folders."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in name.split("/") if name != os.curdir else ():
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = below
    except BaseException:
        os.close(folder)
        raise
    return folder


def _content(name: str, folder: int | None, *, at_most: int) -> bytes | None:
    """The content of a file; None if it is missing; b"" for links, folders and files of another size than `at_most`."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_size != at_most:
        return b""
    with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder), "rb") as file:
        return file.read(at_most)


def is_file(path: str) -> bool:
    """Whether a file exists; False for invalid names."""
    try:
        return os.path.isfile(path)
    except ValueError:  # a null character in it
        return False
