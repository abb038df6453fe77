"""What was dropped on the Batch tab -> pictures to read when their turn comes, and notes of what was passed over."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from llama_adapter.app.online.service import ServiceLimits
from llama_adapter.app.web.archive import Archive, ArchiveLimits, counted, safe_name, unique_name
from llama_adapter.app.web.batch_types import PictureFile
from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.formats import PICTURE_SUFFIXES

MAX_PICTURES: Final = 2_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """A file that a browser brought: where it is, and what the browser calls it."""

    path: str
    name: str


def uploads_of(value: object) -> list[Upload]:
    """The files in the unprocessed value of an upload component; anything else in it is left out."""
    files = value if isinstance(value, list) else []
    return [
        Upload(path=file["path"], name=name if isinstance(name, str) and name else os.path.basename(file["path"]))
        for file in files
        if isinstance(file, dict) and isinstance(file.get("path"), str)
        for name in [file.get("orig_name")]
    ]


class BatchFiles:
    """The pictures of one run, with the archives that they are read from. Close it, or use it in a `with`."""

    def __init__(
        self,
        uploads: Sequence[Upload],
        folder: Sequence[Upload],
        *,
        find: Callable[[str], Path | None],
        limits: ServiceLimits,
        max_pictures: int = MAX_PICTURES,
    ) -> None:
        """`uploads` were named one by one: of any suffix, zips among them. Of a `folder` only pictures count.

        `find` gives the file of an upload's path, or None for one that is gone or was never uploaded. A zip that cannot
        be opened stays one picture, whose reading says why.
        """
        self.pictures: list[PictureFile] = []
        self.notes: list[str] = []  # sentences
        self._find, self._limits, self._max_pictures = find, limits, max_pictures
        self._taken: set[str] = set()
        self._num_left_out = 0
        self._archives = ExitStack()
        try:
            for upload in uploads:
                name = safe_name(upload.name)[0]
                if name.lower().endswith(".zip"):
                    self._add_archive(upload.path, name)
                else:
                    self._add_upload(upload.path, name)
            self._add_folder(folder)
        except BaseException:
            self.close()
            raise
        if self._num_left_out:
            self.notes.append(
                f"One run takes {max_pictures:,} pictures; {counted(self._num_left_out, 'more')} were left out."
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the archives; harmless when repeated."""
        self._archives.close()

    def _add(self, name: str, read: Callable[[], bytes]) -> None:
        if len(self.pictures) >= self._max_pictures:
            self._num_left_out += 1
            return
        self.pictures.append(PictureFile(name=unique_name(name, self._taken), read=read))

    def _add_upload(self, path: str, name: str) -> None:
        self._add(name, partial(self._read, path, name))

    def _found(self, path: str, name: str) -> Path:
        real = self._find(path)
        if real is None:
            raise PictureError("missing", f"`{name}` is no longer on the server; add it again.")
        return real

    def _read(self, path: str, name: str) -> bytes:
        most = self._limits.max_picture_bytes
        try:
            with self._found(path, name).open("rb") as file:
                data = file.read(most + 1)
        except OSError as error:
            raise PictureError("unreadable", f"`{name}` cannot be read ({error.strerror}); add it again.") from error
        if len(data) > most:
            raise PictureError("too_large", f"Wanted at most {most:,} bytes, but `{name}` has more; make it smaller.")
        return data

    def _add_folder(self, folder: Sequence[Upload]) -> None:
        num_passed = 0
        for upload in folder:
            name = safe_name(upload.name)[0]
            if name.startswith(".") or os.path.splitext(name)[1].lower() not in PICTURE_SUFFIXES:
                num_passed += 1
            else:
                self._add_upload(upload.path, name)
        if num_passed:
            self.notes.append(f"The folder: passed over {counted(num_passed, 'file that is no picture')}.")

    def _add_archive(self, path: str, name: str) -> None:
        limits = ArchiveLimits(max_entry_bytes=self._limits.max_picture_bytes, max_entries=self._max_pictures)
        try:
            archive = self._archives.enter_context(Archive(self._found(path, name), name=name, limits=limits))
        except PictureError as error:
            self._add(name, partial(_raise, error.code, error.message))
            return
        for entry in archive.pictures:
            self._add(entry.name, partial(archive.read, entry))
        self.notes += archive.notes()
        if not archive.pictures:
            self.notes.append(f"{name}: there are no pictures in it.")


def _raise(code: str, message: str) -> bytes:
    raise PictureError(code, message)  # type: ignore[arg-type]  # a code of the error that was caught
