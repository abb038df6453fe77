"""Text files for pictures, beside them or mirrored in a folder. The names come from a file and are not trusted."""

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from llama_adapter.app.exports.formats import SidecarNames, safe_path
from llama_adapter.app.records.picture_names import place_of
from llama_adapter.runtime.text import shown_name

MAX_TOLD: Final = 10  # of the files that could not be written, by name
# Of one file or folder: others may be written all the same. A full disk, for one, is nobody's fault but the disk's.
_OF_ONE_FILE: Final = {
    *(errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EEXIST),
    *(errno.EINVAL, errno.ENOENT),
}


class _RefusedError(Exception):
    """Why one text is not written."""


@dataclass(kw_only=True, slots=True)
class Refusals:
    """Pictures for which nothing was written, and why: all are counted, some are told."""

    count: int = 0
    told: list[str] = field(default_factory=list)  # the first `MAX_TOLD`

    def add(self, picture: str, why: str) -> None:
        """Take one more."""
        self.count += 1
        if len(self.told) < MAX_TOLD:
            self.told.append(f"{shown_name(picture)}: {why}")

    def lines(self) -> list[str]:
        """For stderr."""
        more = self.count - len(self.told)
        return [f"error: {one}" for one in self.told] + ([f"error: and {more} more"] if more else [])


class SidecarFiles:
    """Writes one text file for each picture: `a/b.png` -> `a/b.txt`; where two pictures share that, `a/b.png.txt`.

    Each file is written under another name and renamed, so that it is whole or not there; one that holds the text
    already stays untouched, and one that holds anything else is left alone unless `force`. A link in a file's place is
    replaced, not followed.
    """

    def __init__(self, out: str | None, *, force: bool, below: Sequence[str] = ()) -> None:
        """In the folder `out`, with the folders of pictures as `safe_path` gives them; None: beside the pictures.

        Below `out` no link is followed. Beside pictures, a text is only written where the picture is a file in one of
        the folders `below`, at any depth, once all links to it are followed.
        """
        self.num_written = self.num_same = 0  # the same: were there already
        self.refusals = Refusals()
        self.num_outside = 0  # pictures that are in none of the folders
        self.outside: str | None = None  # the folder that all of those are in
        self._force, self._names, self._is_beside = force, SidecarNames(), out is None
        if out is not None:
            os.makedirs(out, exist_ok=True)
        self._roots = tuple(dict.fromkeys(map(os.path.realpath, below if out is None else [out])))
        self._folder: int | None = None  # the one that was written to last
        self._folder_name: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_folder()

    def see(self, picture: str) -> None:
        """Tell of every picture before the first text, so that no text takes the name of a folder."""
        self._names.avoid_folders_of(self._place(picture))

    def write(self, picture: str, text: str) -> None:
        """Put one text in its place, or count it as refused. Raises OSError for what concerns all files."""
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
        """Raise where beside that picture nothing may be written."""
        folder = os.path.dirname(place)
        if _root_of(folder, self._roots) is None and os.path.isabs(folder):
            self.num_outside += 1
            self.outside = folder if self.outside is None else os.path.commonpath((self.outside, folder))
            raise _RefusedError("it is in no folder that texts may be written to; name its folder as --below")
        if not is_file(place):
            raise _RefusedError("there is no such picture; name a folder as --out for its text")

    def _put(self, folder: str, name: str, data: bytes) -> bool:
        """Whether the file is new; False: it was there with this text."""
        self._open_folder(folder)
        there = _content(name, self._folder, at_most=len(data))
        if there == data:
            return False
        if there is not None and not self._force:
            raise _RefusedError(f"`{name}` is there already with other content; replace it with --force")
        beside = f".{secrets.token_hex(8)}.partial"
        try:
            descriptor = os.open(
                beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=self._folder
            )
            with open(descriptor, "wb") as file:
                file.write(data)
            os.replace(beside, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(beside, dir_fd=self._folder)
        return True

    def _open_folder(self, name: str) -> None:
        if self._folder_name == name:
            return
        self._close_folder()
        root = _root_of(name, self._roots)
        assert root is not None, "only places below a root are written to"
        self._folder = _open_below(root, os.path.relpath(name, root), make=not self._is_beside)
        self._folder_name = name

    def _close_folder(self) -> None:
        if self._folder is not None:
            os.close(self._folder)
        self._folder = self._folder_name = None


def _root_of(folder: str, roots: Iterable[str]) -> str | None:
    """The root that a folder is, or is in."""
    return next((root for root in roots if folder == root or folder.startswith(root.rstrip("/") + "/")), None)


def _open_below(root: str, name: str, *, make: bool) -> int:
    """Open a folder below `root`, one step after the other and through no link; `make` it where it is missing."""
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
    """What is in a file; None where there is none. A link, a folder or a longer file is something else: b""."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_size != at_most:
        return b""
    with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder), "rb") as file:
        return file.read(at_most)


def is_file(path: str) -> bool:
    """Whether there is a file; also for names that no file can have."""
    try:
        return os.path.isfile(path)
    except ValueError:  # a null character in it
        return False
