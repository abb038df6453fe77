"""Texts of pictures in files, next to them or in a folder. Picture names come from records and are not trusted."""

import errno
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Self

from llama_adapter.app.jobs.exports.formats import SidecarNames, safe_path
from llama_adapter.app.pictures.inputs.xmp import MAX_BYTES as MAX_TEXT_BYTES
from llama_adapter.app.pictures.inputs.xmp import description_of, with_description
from llama_adapter.app.pictures.names import place_of
from llama_adapter.runtime.partial import create_partial, named_after, remove_leftovers_in
from llama_adapter.runtime.text import one_line, shown_name

Existing = Literal["refuse", "keep", "replace", "extend"]

_TOO_LARGE: Final = b"\xff"  # no text
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


class TextFormat(NamedTuple):
    """How a text is kept in a file. Both functions raise ValueError with the reason."""

    suffix: str  # the usual one of files
    is_whole: bool  # whether a file is its text; otherwise it has more, which must not be lost
    read: Callable[[bytes], str]  # the text in a file, "" for none
    write: Callable[[str, bytes | None], bytes]  # the content of a file with this text, from its present content
    is_added: bool = False  # whether `suffix` is added to that of the picture, as in `a.png.xmp`; else it replaces that


def _read_plain(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig").rstrip()
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None


PLAIN_TEXT: Final = TextFormat(
    ".txt", is_whole=True, read=_read_plain, write=lambda text, data: text.encode(errors="backslashreplace") + b"\n"
)
# The rest of a file is kept.
XMP: Final = TextFormat(".xmp", is_whole=False, read=description_of, write=with_description, is_added=True)


class SidecarFiles:
    """Writes one text file for each picture: `a/b.png` -> `a/b.txt`, or `a/b.png.txt` if that name is taken.

    Files are written under a temporary name and then renamed, so that a file is complete or missing. A file that has
    the text already is not touched, and what is no text is never replaced. Links are replaced, not followed.
    """

    def __init__(
        self,
        out: str | None,
        *,
        existing: Existing = "refuse",
        below: Sequence[str] = (),
        text_format: TextFormat = PLAIN_TEXT,
        suffix: str | None = None,
    ) -> None:
        """With `out`, texts are written into this folder, by `safe_path`, without following links.

        With None, texts are written next to the pictures, but only for existing pictures that lie below one of the
        folders `below` after all links are resolved. `existing` is for files with another text. `suffix` replaces that
        of the pictures; None: the usual suffix of `text_format`.
        """
        self.num_written = self.num_same = self.num_kept = 0  # same: the file existed with this text
        self.num_other_names = 0  # texts whose names are not the picture's with another suffix
        self.other_name: tuple[str, str] | None = None  # the first of these, and its text
        self.refusals = Refusals()
        self.num_outside = 0  # number of pictures outside of all allowed folders
        self.outside: str | None = None  # the common folder of these pictures
        self._existing, self._format, self._is_beside = existing, text_format, out is None
        is_added = suffix is None and text_format.is_added
        self._names = SidecarNames(suffix=suffix or text_format.suffix, is_added=is_added, is_beside=self._is_beside)
        if out is not None:
            os.makedirs(out, exist_ok=True)
        self._roots = tuple(dict.fromkeys(map(os.path.realpath, below if out is None else [out])))
        self._folder: int | None = None  # descriptor of the folder written to last
        self._folder_name: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_folder()

    def write(self, picture: str, text: str) -> None:
        """Write one text, or count it as refused. Raises OSError for errors that concern all files."""
        place = place_of(picture) if self._is_beside else os.path.join(self._roots[0], safe_path(picture))
        try:
            if self._is_beside:
                self._check(place)
            folder, name = os.path.split(self._names.take(place))
            self._put(folder, name, text)
        except _RefusedError as refusal:
            self.refusals.add(picture, str(refusal))
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in _OF_ONE_FILE:
                raise
            self.refusals.add(picture, getattr(error, "strerror", None) or str(error))
        else:
            if name != os.path.basename(self._names.usual(place)):
                self.num_other_names += 1
                self.other_name = self.other_name or (os.path.basename(place), name)

    def _check(self, place: str) -> None:
        """Raise `_RefusedError` if no text may be written next to this picture."""
        folder = os.path.dirname(place)
        if _root_of(folder, self._roots) is None and os.path.isabs(folder):
            self.num_outside += 1
            self.outside = folder if self.outside is None else os.path.commonpath((self.outside, folder))
            raise _RefusedError("it is in no folder that texts may be written to; name its folder as --below")
        if not os.path.isfile(place):
            raise _RefusedError(
                "there is no such file; export in the folder where the job ran, remove the record of a deleted "
                "picture, or name a folder as --out for its text"
            )

    def _put(self, folder: str, name: str, text: str) -> None:
        """Write one file, unless it is kept or has this text, also in lines, as earlier versions wrote it."""
        self._open_folder(folder)
        is_there, there = _content(name, self._folder)
        if is_there:
            old = self._old_text(name, there)
            wanted = self._format.read(self._format.write(text, None))
            is_same = old == wanted or (old is not None and self._existing != "replace" and one_line(old) == wanted)
            if is_same or (self._existing == "extend" and old is not None and _has_part(old, one_line(wanted))):
                self.num_same += 1
                return
            if old != "":
                match self._existing:
                    case "keep":
                        self.num_kept += 1
                        return
                    case "extend" if old is not None:
                        text = f"{old}, {text}"
                    case "refuse" | "extend":
                        raise _RefusedError(f"`{name}` is there already with other content; see --existing")
        data = self._format.write(text, there)
        with named_after(os.path.join(folder, name)):
            file = create_partial(name, folder=self._folder)
            try:
                with file:
                    file.write(data)
                os.replace(file.name, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(file.name, dir_fd=self._folder)
        self.num_written += 1

    def _old_text(self, name: str, there: bytes | None) -> str | None:
        """The text of an existing file; None for a link, which may be replaced. `there` is its content."""
        if there is None and self._format.is_whole:
            return None
        try:
            if there is None:
                raise ValueError("it is a link or a folder")
            return self._format.read(there)
        except ValueError as error:
            if self._existing == "keep":
                return None
            raise _RefusedError(f"`{name}` is there already and is not changed: {error}") from None

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


def _has_part(text: str, part: str) -> bool:
    """Whether a part between the commas or line feeds of a text is this; it may have commas, and had lines earlier."""
    return not part or any(f", {part}," in f", {one}," for one in (", ".join(text.splitlines()), one_line(text)))


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


def _content(name: str, folder: int | None) -> tuple[bool, bytes | None]:
    """Whether there is a file, and its content; None for links and folders. Of a large file, `_TOO_LARGE`."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False, None
    if not stat.S_ISREG(status.st_mode):
        return True, None
    with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder), "rb") as file:
        return True, file.read(MAX_TEXT_BYTES) if status.st_size <= MAX_TEXT_BYTES else _TOO_LARGE
