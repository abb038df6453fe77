"""Tar archives in the format of webdataset: pictures, with the texts of their samples as columns."""

import json
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from llama_adapter.app.inputs.fields import as_columns
from llama_adapter.app.inputs.folders import has_picture_suffix
from llama_adapter.app.inputs.items import PictureInput
from llama_adapter.app.inputs.member_names import MemberNames
from llama_adapter.app.inputs.tar_members import TarMember, TarReader, opened_tar
from llama_adapter.app.tasks.answers import AnswerError
from llama_adapter.runtime.text import shown_name

ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst")
MAX_TEXT_BYTES = 2**20  # limit for a member that holds columns
_TEXTS = ("txt", "cls", "caption")
# Samples have a few members. If more members share a name, it is by chance, and the sample is split.
_MAX_PICTURES, _MAX_SAMPLE_BYTES = 64, 2**28
_DAMAGES = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError)


def is_archive_name(name: str) -> bool:
    """Whether a file name has the suffix of an archive."""
    return name.lower().endswith(ARCHIVE_SUFFIXES)


def archive_inputs(path: str, *, max_bytes: int | None = None) -> Iterator[PictureInput]:
    """The pictures in an archive, in the order of its members. A label is `archive.tar/name/of/member.jpg`.

    A picture whose name an earlier one has is called `archive.tar/name/in/it (2).jpg`, and so on.

    Consecutive members that share their name up to the first dot of its last part are one sample. The scalar values of
    its `.json` member and the texts of its `.txt`, `.cls` and `.caption` members are the columns of its pictures.
    Malformed texts and texts above 1 MiB are ignored, and so are hidden members and `__like_this__`. The source of a
    picture is a `FileSlice` in an uncompressed archive, and the picture's bytes in a compressed one. Links, sparse
    files and compressed pictures above `max_bytes` (default: that of `vision.image`) are items with an error.

    For an archive that is unreadable, damaged or without pictures, the last item has an error of code "archive".
    """
    last = None
    for item in _pictures_in(path, max_bytes=max_bytes):
        if last is not None:
            yield last
        last = item
    if last is not None:
        yield last if last.label == path else replace(last, found_in=(path,))


def _pictures_in(path: str, *, max_bytes: int | None) -> Iterator[PictureInput]:
    from llama_adapter.vision.image import DEFAULT_MAX_BYTES  # brings Pillow with it

    num_pictures, damage, problem = 0, "", ""
    max_bytes, names = DEFAULT_MAX_BYTES if max_bytes is None else max_bytes, MemberNames()
    sample = _Sample(archive=path, max_bytes=max_bytes, names=names)
    try:
        with opened_tar(path) as tar:
            for member in tar.members():
                if _is_hidden(member.name):
                    continue
                key, extension = _split(member.name)
                if key != sample.key or sample.is_full:
                    num_pictures += len(sample.pictures)
                    yield from sample.inputs()
                    sample = _Sample(archive=path, max_bytes=max_bytes, names=names, key=key)
                sample.add(member, extension=extension, tar=tar)
    except tarfile.CompressionError as error:
        problem = str(error)
    except _DAMAGES as error:
        damage = str(error) or type(error).__name__
    except OSError as error:  # gzip and bzip2 raise it for damaged data too
        damage = f"the system says: {error.strerror}" if error.strerror else str(error)
    num_pictures += len(sample.pictures)
    yield from sample.inputs()
    if damage:
        problem = f"it is damaged ({damage}; pictures found before that: {num_pictures:,}); copy it again."
    if problem or not num_pictures:
        problem = problem or "it has none with the suffix of a picture."
        message = f"Wanted the pictures in the archive `{shown_name(path)}`, but {problem}"
        yield PictureInput.failed(path, "archive", message, root=path)


@dataclass(slots=True)
class _Sample:
    """The sample that is currently being read."""

    archive: str
    max_bytes: int
    names: MemberNames  # of the whole archive
    key: str | None = None
    pictures: list[PictureInput] = field(default_factory=list)
    columns: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.pictures) >= _MAX_PICTURES or self.num_bytes >= _MAX_SAMPLE_BYTES

    def add(self, member: TarMember, *, extension: str, tar: TarReader) -> None:
        if has_picture_suffix(member.name):
            if member.kind != "folder":
                self._add_picture(member, tar=tar)
        elif member.kind == "file" and extension in ("json", *_TEXTS) and member.num_bytes <= MAX_TEXT_BYTES:
            self.columns.update(_columns(tar.read(member), extension=extension))

    def inputs(self) -> Iterator[PictureInput]:
        for picture in self.pictures:
            yield replace(picture, columns=self.columns)

    def _add_picture(self, member: TarMember, *, tar: TarReader) -> None:
        from llama_adapter.app.reading.sources import FileSlice  # brings Pillow with it

        name = member.name.removeprefix("./")
        own = self.names.take(name)
        label, repeats = f"{self.archive}/{own}", f"{self.archive}/{name}" if own != name else ""
        shown = shown_name(label)
        source: str | bytes | FileSlice = self.archive
        error = None
        if member.kind != "file":
            kind = "a sparse file" if member.kind == "sparse" else "a link or a device"
            message = f"Wanted a picture, but `{shown}` is {kind} in the archive; pack the picture itself."
            error = AnswerError(code="unsupported", message=message)
        elif tar.is_plain:
            source = FileSlice(
                path=self.archive, offset=member.offset, num_bytes=member.num_bytes, header=member.header
            )
        elif member.num_bytes > self.max_bytes:
            message = (
                f"Wanted at most {self.max_bytes:,} bytes, but `{shown}` has {member.num_bytes:,}; "
                "make the picture smaller, or unpack the archive and raise the limit."
            )
            error = AnswerError(code="too_large", message=message)
        else:
            source = tar.read(member)
            self.num_bytes += member.num_bytes
        self.pictures.append(PictureInput(source=source, label=label, root=self.archive, repeats=repeats, error=error))


def _is_hidden(name: str) -> bool:
    *folders, base = name.split("/")
    if base.startswith("__") and base.endswith("__"):
        return True
    return base.startswith(".") or any(part.startswith(".") and part not in (".", "..") for part in folders)


def _split(name: str) -> tuple[str, str]:
    """The sample key of a member name, and the member's extension in lower case."""
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return f"{folder}{slash}{stem}", extension.lower()


def _columns(data: bytes, *, extension: str) -> dict[str, str]:
    try:
        text = data.decode("utf-8-sig")
        if extension in _TEXTS:
            return {extension: text.strip()}
        values = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return as_columns(values) if isinstance(values, dict) else {}
