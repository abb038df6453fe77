"""Tar archives in the format of webdataset: pictures, with the texts of their samples as columns."""

import lzma
import re
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.inputs.fields import JSON, as_columns
from llama_adapter.app.pictures.inputs.folders import has_picture_suffix, is_thumbnail_folder
from llama_adapter.app.pictures.inputs.items import LeftOut, PictureInput
from llama_adapter.app.pictures.inputs.tar_members import TarMember, TarReader, opened_tar
from llama_adapter.app.pictures.names import UniqueNames
from llama_adapter.runtime.text import shown_excerpt, shown_name
from llama_adapter.vision.files import DEFAULT_MAX_BYTES

ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst")
MAX_TEXT_BYTES = 2**20  # limit for a member that holds columns
_TEXTS = ("txt", "cls", "caption")
# A line of YOLO's texts: a class, and at least four shares of the picture's size (2: a point that is seen).
_BOX = re.compile(r"(?=.*\.)\d+(?: (?:[0-2]?\.\d+|[0-2]|\d(?:\.\d+)?e-\d+)){4,}")
# Samples have a few members. If more members share a name, it is by chance, and the sample is split.
_MAX_PICTURES, _MAX_SAMPLE_BYTES = 64, 2**28
_DAMAGES = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError)


def is_archive_name(name: str) -> bool:
    """Whether a file name has the suffix of an archive."""
    return name.lower().endswith(ARCHIVE_SUFFIXES)


def archive_inputs(
    path: str,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
    fields: tuple[str, ...] | None = None,
    left_out: LeftOut | None = None,
    seen: set[str] | None = None,
) -> Iterator[PictureInput]:
    """The pictures in an archive, in the order of its members. A label is `archive.tar/name/of/member.jpg`.

    A picture whose name an earlier one has is called `archive.tar/name/in/it (2).jpg`, and so on.

    Consecutive members that share their name up to the first dot of its last part are one sample. Its columns are the
    scalar values of its `.json` and the texts of its `.txt`, `.cls` and `.caption`. In a sample with texts, a picture
    shares its name with a text (`a.txt` or `a.png.txt`), or has no field in it: beside `a.txt`, `a.png` is the picture
    and `a.seg.png` is left out. The `fields` ("input", "outputs") choose `a.input.png` and `a.outputs.txt`. `left_out`
    counts what is left out, and `seen`, an empty set, gets the names of all fields, such as seg.png.

    Malformed texts and texts above 1 MiB are left out, and so are hidden members and `__like_this__`. The source of a
    picture is a `FileSlice` in an uncompressed archive, and the picture's bytes in a compressed one. Links, sparse
    files and compressed pictures above `max_bytes` (default: that of `vision.image`) are items with an error.

    For an archive that is unreadable, damaged or without pictures, the last item has an error of code "archive".
    """
    last = None
    left_out, seen = LeftOut() if left_out is None else left_out, set() if seen is None else seen
    for item in _pictures_in(path, max_bytes=max_bytes, fields=fields, left_out=left_out, seen=seen):
        if last is not None:
            yield last
        last = item
    if last is not None:
        yield last if last.label == path else replace(last, found_in=(path,))


def _pictures_in(
    path: str, *, max_bytes: int, fields: tuple[str, ...] | None, left_out: LeftOut, seen: set[str]
) -> Iterator[PictureInput]:
    num_pictures, damage, problem, names = 0, "", "", UniqueNames()
    sample = _Sample(archive=path, max_bytes=max_bytes, names=names)

    def chosen() -> list[PictureInput]:
        nonlocal num_pictures
        found = list(sample.inputs(fields, left_out=left_out, seen=seen))
        num_pictures += len(found)
        return found

    try:
        with opened_tar(path) as tar:
            for member in tar.members():
                if _is_hidden(member.name):
                    if has_picture_suffix(member.name) and any(map(is_thumbnail_folder, member.name.split("/")[:-1])):
                        left_out.add("thumbnails", f"{path}/{member.name}")
                    continue
                key = _key(member.name)
                if key != sample.key or sample.is_full or sample.is_repeated_by(member):
                    yield from chosen()
                    sample = _Sample(archive=path, max_bytes=max_bytes, names=names, key=key)
                sample.add(member, tar=tar)
    except tarfile.CompressionError as error:
        problem = str(error)
    except _DAMAGES as error:
        damage = str(error) or type(error).__name__
    except OSError as error:  # gzip and bzip2 raise it for damaged data too
        damage = f"the system says: {error.strerror}" if error.strerror else str(error)
    yield from chosen()
    if damage:
        problem = f"it is damaged ({damage}; pictures found before that: {num_pictures:,}); copy it again."
    if problem or not num_pictures:
        none = "with the suffix of a picture"
        if fields and any(has_picture_suffix(f"a.{name}") for name in seen):
            none = f"in the field {shown_name(fields[0])}: it has {shown_excerpt(', '.join(sorted(seen)))}"
        problem = problem or f"it has none {none}."
        message = f"Wanted the pictures in the archive `{shown_name(path)}`, but {problem}"
        yield PictureInput.failed(path, "archive", message, root=path)


@dataclass(slots=True)
class _Sample:
    """The sample that is currently being read."""

    archive: str
    max_bytes: int
    names: UniqueNames  # of the whole archive
    key: str = ""
    # Each with its stem, the member's name without its suffix; texts are columns of the pictures.
    pictures: list[tuple[str, PictureInput]] = field(default_factory=list)
    texts: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)  # each with its suffix too
    fields: set[str] = field(default_factory=set)
    num_bytes: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.pictures) >= _MAX_PICTURES or self.num_bytes >= _MAX_SAMPLE_BYTES

    def is_repeated_by(self, member: TarMember) -> bool:
        """Whether the sample has a picture, texts and a member of that name, as in shards that were joined.

        A text that was appended again alone also begins a sample, which is then counted as one without a picture.
        """
        return bool(self.pictures and self.texts) and member.name[len(self.key) + 1 :] in self.fields

    def add(self, member: TarMember, *, tar: TarReader) -> None:
        stem, _, suffix = member.name.rpartition(".")
        if has_picture_suffix(member.name):
            if member.kind != "folder":
                self._add_picture(member, stem=stem, tar=tar)
                self.fields.add(member.name[len(self.key) + 1 :])
        elif member.kind == "file" and suffix.lower() in ("json", *_TEXTS):
            columns: dict[str, str] = {}
            if member.num_bytes <= MAX_TEXT_BYTES:
                data = tar.read(member)
                with suppress(ValueError):
                    columns = as_columns(text_values(data, suffix=suffix.lower()))
            self.texts.append((stem, suffix, columns))
            self.fields.add(member.name[len(self.key) + 1 :])

    def inputs(self, fields: tuple[str, ...] | None, *, left_out: LeftOut, seen: set[str]) -> Iterator[PictureInput]:
        """The pictures of the sample with their columns; `left_out` counts the others."""
        seen.update(self.fields)
        stems = {stem for stem, *_ in self.texts}
        named = {f"{self.archive}/{stem.removeprefix('./')}": stem for stem in stems}  # a.png of a.png.txt
        of_picture, of_text = (*(fields or ()), "", "")[:2]
        if of_picture:
            chosen = [one for one in self.pictures if self._field(one[0]) == of_picture]
        elif self.texts:
            first = dict(reversed(self.pictures))  # the first picture of each stem
            # A member with the name of an earlier one stays: labelled data refuse it, jobs number it.
            paired = [
                (stem, one)
                for stem, one in self.pictures
                if (one.repeats or one.label) in named or (stem in stems and (one is first[stem] or one.repeats))
            ]
            chosen = paired or [one for one in self.pictures if not self._field(one[0])] or self.pictures
        else:
            chosen = self.pictures
        for stem, picture in chosen:
            columns: dict[str, str] = {}
            whole = named.get(picture.repeats or picture.label)
            mine = {whole, stem, self.key}
            # The text with the picture's whole name comes last, so that it counts.
            for of, _, values in sorted(self.texts, key=lambda text: text[0] == whole):
                own = self._field(of)
                if (own == of_text) if of_text else of in mine:
                    columns |= values
                elif not of_text and not mine & stems:
                    columns |= {own if name in _TEXTS else name: value for name, value in values.items()}
            yield replace(picture, columns=columns)
        for stem, suffix, values in self.texts:
            if not values:
                left_out.add("texts without values that can be read", f"{self.archive}/{stem}.{suffix}")
        taken = {picture.label for _, picture in chosen}
        for _, picture in self.pictures:
            if picture.label not in taken:
                left_out.add("second pictures of a sample", picture.label)
        if not chosen and self.texts:
            left_out.add("samples without a picture", f"{self.archive}/{self.key}")

    def _field(self, stem: str) -> str:
        """The name of a member's field in the sample, such as seg for a.seg.png; "" if it has none."""
        return stem[len(self.key) + 1 :]

    def _add_picture(self, member: TarMember, *, stem: str, tar: TarReader) -> None:
        from llama_adapter.app.pictures.reading.sources import FileSlice  # brings Pillow with it

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
        picture = PictureInput(source=source, label=label, root=self.archive, repeats=repeats, error=error)
        self.pictures.append((stem, picture))


def _is_hidden(name: str) -> bool:
    *folders, base = name.split("/")
    if (base.startswith("__") and base.endswith("__")) or any(map(is_thumbnail_folder, folders)):
        return True
    return base.startswith(".") or any(part.startswith(".") and part not in (".", "..") for part in folders)


def _key(name: str) -> str:
    """The name of the sample of a member."""
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}{base.partition('.')[0]}"


def text_values(data: bytes, *, suffix: str) -> dict[str, object]:
    """The columns of a text about a picture: of its JSON object, or the whole text by its suffix, such as txt.

    Lines of boxes in a `.txt` are no text. Raises ValueError with the reason if there are no columns.
    """
    try:
        text = data.decode("utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    if suffix in _TEXTS:
        are_boxes = suffix == "txt" and all(_BOX.fullmatch(line.strip()) for line in text.splitlines())
        return {suffix: "" if are_boxes else text.strip()}
    try:
        values = JSON.decode(text)
    except (ValueError, RecursionError):
        raise ValueError("it is not valid JSON") from None
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    return values
