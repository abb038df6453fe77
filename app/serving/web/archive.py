"""Reads pictures from an uploaded zip one at a time. Nothing is unpacked to disk, and no header is trusted."""

import io
import os
import re
import stat
import threading
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, Final, NamedTuple

from llama_adapter.app.pictures.inputs.folders import has_picture_suffix, is_thumbnail_folder
from llama_adapter.app.pictures.names import UniqueNames
from llama_adapter.runtime.text import counted, shown_name
from llama_adapter.vision.errors import PictureError

ARCHIVE_SUFFIXES: Final = frozenset({".zip", ".7z", ".rar", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst"})

_PLURALS: Final = {
    "file that is not a picture": "files that are not pictures",
    "picture over the limit": "pictures over the limit",
}
_CHUNK_BYTES: Final = 2**20
_ENCRYPTED: Final = 0x1  # one of a zip entry's flag bits
# Python unpacks these methods in bounded pieces. With other methods, a few bytes can become gigabytes at once.
_BOUNDED_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveLimits:
    """Limits on what is read from one archive."""

    max_entry_bytes: int  # size of one unpacked picture
    max_entries: int = 2_000  # pictures; further pictures are left out, which `notes` reports
    max_total_bytes: int = 2**30  # size of all unpacked pictures together
    max_directory_bytes: int = 2 * 2**20  # size of the list of entries; `max_entries` entries need far less


class ArchiveEntry(NamedTuple):
    """One picture in an archive."""

    name: str  # printable, relative, including folders; unique in the archive
    info: zipfile.ZipInfo


class Archive:
    """An open zip: its pictures in order, and the kinds of entries that are skipped. Thread-safe.

    Opening raises PictureError if the file is not a zip or has too many entries. The caller must close it.
    """

    def __init__(self, path: str | os.PathLike[str], *, name: str, limits: ArchiveLimits) -> None:
        self.name, self.limits = name, limits
        self.pictures: list[ArchiveEntry] = []
        self.skipped: Counter[str] = Counter()  # kind -> number of skipped entries
        self._lock = threading.Lock()
        self._num_bytes_left = limits.max_total_bytes
        try:
            self._file = open(path, "rb")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise PictureError("unreadable", f"`{name}` cannot be read ({error.strerror}); add it again.") from error
        try:
            self._zip = zipfile.ZipFile(_Bounded(self._file, max_read=limits.max_directory_bytes))
            self._choose()
        except _TooMuchAtOnceError:
            self._file.close()
            raise PictureError(
                "too_large",
                f"Wanted a zip with at most {limits.max_entries:,} pictures, but the list of entries in `{name}` "
                f"takes more than {limits.max_directory_bytes:,} bytes; split it into several.",
            ) from None
        except Exception as error:  # a damaged list of entries raises many kinds of errors
            self._file.close()
            words = " ".join(str(error).split())[:120]
            raise PictureError(
                "truncated",
                f"Wanted a zip, but `{name}` is not one, or is cut off or damaged ({words}); make it again.",
            ) from error

    def close(self) -> None:
        """Close the file. May be called again."""
        with self._lock:
            self._zip.close()
            self._file.close()

    def read(self, entry: ArchiveEntry) -> bytes:
        """The bytes of one picture. Raises PictureError if it cannot be read or exceeds a limit."""
        info, label = entry.info, f"`{entry.name}`"
        if info.flag_bits & _ENCRYPTED:
            raise PictureError(
                "unsupported", f"{label} is encrypted, which is not supported; make a zip without a password."
            )
        if info.compress_type not in _BOUNDED_METHODS:
            raise PictureError("unsupported", f"{label} uses an unsupported compression method; make an ordinary zip.")
        with self._lock:
            most = min(self.limits.max_entry_bytes, self._num_bytes_left)
            try:
                data = self._read(info, most + 1)
            except Exception as error:
                raise PictureError(
                    "truncated", f"{label} is cut off or damaged inside `{self.name}`; make the zip again."
                ) from error
            self._num_bytes_left = max(0, self._num_bytes_left - len(data))
        if len(data) > most:
            whose = label if most == self.limits.max_entry_bytes else f"`{self.name}` up to {label}"
            raise PictureError("too_large", f"Wanted at most {most:,} unpacked bytes, but {whose} has more.")
        return data

    def notes(self) -> list[str]:
        """A sentence about what was skipped; empty if nothing was."""
        return [skipped_note(self.name, self.skipped)] if self.skipped else []

    def _read(self, info: zipfile.ZipInfo, most: int) -> bytes:
        """At most the first `most` bytes of an entry, whatever its header says. Reading its end checks the checksum."""
        unpacked = io.BytesIO()
        with self._zip.open(info) as file:
            while unpacked.tell() < most and (chunk := file.read(min(_CHUNK_BYTES, most - unpacked.tell()))):
                unpacked.write(chunk)
        return unpacked.getvalue()

    def _choose(self) -> None:
        """Split the entries into pictures and skipped kinds."""
        names = UniqueNames(str.casefold)
        for info in self._zip.infolist():
            if info.is_dir():
                continue
            name = safe_name(info.filename)
            kind = "link" if stat.S_ISLNK(info.external_attr >> 16) else skipped_kind(name)
            if kind is None and len(self.pictures) >= self.limits.max_entries:
                kind = "picture over the limit"
            if kind is not None:
                self.skipped[kind] += 1
                continue
            self.pictures.append(ArchiveEntry(names.take(name), info))


def skipped_kind(name: str) -> str | None:
    """The kind of a file of a folder or archive that is skipped, by its name there; None for a picture."""
    *folders, _ = parts = name.split("/")
    if any(part.startswith(".") for part in parts):
        return "hidden file"
    if any(map(is_thumbnail_folder, folders)):
        return "thumbnail"
    if os.path.splitext(name)[1].lower() in ARCHIVE_SUFFIXES:
        return "archive"
    return None if has_picture_suffix(name) else "file that is not a picture"


def skipped_note(name: str, skipped: Mapping[str, int]) -> str:
    """A sentence about the files of a folder or archive that were skipped, by their kinds."""
    counts = (counted(number, kind, plural=_PLURALS.get(kind)) for kind, number in sorted(skipped.items()))
    return f"{name}: skipped {', '.join(counts)}."


def safe_name(name: str) -> str:
    """A relative, printable name for a file of an archive or a browser.

    Backslashes are separators too, as on Windows. Drives, leading slashes and `..` are dropped.
    """
    relative = re.sub(r"^[A-Za-z]:", "", name.replace("\\", "/"))
    return shown_name("/".join(part for part in relative.split("/") if part not in ("", ".", ".."))) or "picture"


class _TooMuchAtOnceError(Exception):
    """The list of entries would take too much memory."""


class _Bounded(io.RawIOBase):
    """A file that refuses reads of more than `max_read` bytes, which the headers of a damaged zip may ask for."""

    def __init__(self, file: BinaryIO, *, max_read: int) -> None:
        self._file, self._max_read = file, max_read

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = self._max_read + 1 if size is None or size < 0 else size
        if wanted > self._max_read + 1:
            raise _TooMuchAtOnceError
        data = self._file.read(wanted)
        if len(data) > self._max_read:
            raise _TooMuchAtOnceError
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()
