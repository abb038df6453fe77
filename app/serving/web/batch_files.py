"""The files of a batch: uploads, a folder and zips as one list of pictures to read, with notes on skipped files."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Final

from llama_adapter.app.pictures.names import UniqueNames
from llama_adapter.app.serving.online.types import ServiceLimits
from llama_adapter.app.serving.web.archive import Archive, ArchiveLimits, safe_name, skipped_kind, skipped_note
from llama_adapter.app.serving.web.batch_run import PictureFile
from llama_adapter.app.serving.web.uploads import Upload, read_upload, uploaded
from llama_adapter.vision.errors import PictureError

MAX_PICTURES: Final = 2_000


class BatchFiles:
    """The pictures of one run, and the archives that they are read from. The caller must close it."""

    def __init__(self, uploads: Sequence[Upload], *, limits: ServiceLimits, max_pictures: int = MAX_PICTURES) -> None:
        """`uploads` may have any suffix, including zip. Of those with a folder in their name, only pictures are used.

        A zip that cannot be opened becomes one picture; reading it raises the reason.
        """
        self.pictures: list[PictureFile] = []
        self.notes: list[str] = []  # sentences about skipped files
        self._limits, self._max_pictures = limits, max_pictures
        self._names = UniqueNames(str.casefold)
        self._num_left_out, skipped = 0, Counter[str]()
        self._archives = ExitStack()
        try:
            for upload in uploads:
                name = safe_name(upload.name)
                if "/" in upload.name and (kind := skipped_kind(name.split("/", 1)[-1])):
                    skipped[kind] += 1
                elif name.lower().endswith(".zip"):
                    self._add_archive(upload.path, name)
                else:
                    self._add(name, partial(read_upload, upload.path, name=name, max_bytes=limits.max_picture_bytes))
        except BaseException:
            self.close()
            raise
        if skipped:
            self.notes.append(skipped_note("Folder", skipped))
        if self._num_left_out:
            left_out = f"{self._num_left_out:,} more were left out"
            self.notes.append(f"One batch takes {max_pictures:,} pictures; {left_out}.")

    def close(self) -> None:
        """Close the archives. May be called again."""
        self._archives.close()

    def _add(self, name: str, read: Callable[[], bytes]) -> None:
        if len(self.pictures) >= self._max_pictures:
            self._num_left_out += 1
            return
        self.pictures.append(PictureFile(name=self._names.take(name), read=read))

    def _add_archive(self, path: str, name: str) -> None:
        limits = ArchiveLimits(max_entry_bytes=self._limits.max_picture_bytes, max_entries=self._max_pictures)
        try:
            real = uploaded(path)
            if real is None:
                raise PictureError("missing", f"`{name}` is no longer on the server; add it again.")
            archive = self._archives.enter_context(closing(Archive(real, name=name, limits=limits)))
        except PictureError as error:
            self._add(name, partial(_raise, error.code, error.message))
            return
        for entry in archive.pictures:
            self._add(entry.name, partial(archive.read, entry))
        self.notes += archive.notes()
        if not archive.pictures:
            self.notes.append(f"{name}: no pictures in it.")


def _raise(code: str, message: str) -> bytes:
    raise PictureError(code, message)  # type: ignore[arg-type]  # the code comes from a PictureError
