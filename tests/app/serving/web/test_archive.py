"""Archives: pictures are read one by one. Nothing is trusted, unpacked to disk or skipped silently."""

import os
import stat
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.serving.online.service import ServiceLimits
from llama_adapter.app.serving.web.archive import Archive, ArchiveLimits, safe_name
from llama_adapter.app.serving.web.batch_files import MAX_PICTURES, BatchFiles
from llama_adapter.app.serving.web.uploads import Upload, private_uploads
from llama_adapter.vision.errors import PictureError

LIMITS = ArchiveLimits(max_entry_bytes=1_000, max_entries=5, max_total_bytes=3_000, max_directory_bytes=4_096)


def packed(
    folder: Path, entries: Mapping[Any, bytes], *, method: int = zipfile.ZIP_DEFLATED, file: str = "pictures.zip"
) -> Path:
    path = folder / file
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in entries.items():
            archive.writestr(name, data, compress_type=method)
    return path


def opened(path: Path, limits: ArchiveLimits = LIMITS) -> closing[Archive]:
    return closing(Archive(path, name=path.name, limits=limits))


def error_of(archive: Archive, number: int = 0) -> PictureError:
    with pytest.raises(PictureError) as caught:
        archive.read(archive.pictures[number])
    return caught.value


def test_pictures_are_read_entry_by_entry_in_their_order(tmp_path: Path) -> None:
    with opened(packed(tmp_path, {"b.png": b"one", "cats/a.JPG": b"two"})) as archive:
        assert [entry.name for entry in archive.pictures] == ["b.png", "cats/a.JPG"]
        assert [archive.read(entry) for entry in reversed(archive.pictures)] == [b"two", b"one"]
        assert archive.notes() == []
    assert os.listdir(tmp_path) == ["pictures.zip"]  # nothing was unpacked to disk


def test_what_is_not_a_picture_is_counted(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("link.png")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    entries: dict[Any, bytes] = {
        "a.png": b"x",
        "folder/": b"",
        "notes.txt": b"x",
        "list.csv": b"x",
        "__MACOSX/._a.png": b"x",
        ".hidden.png": b"x",
        "cats/.DS_Store": b"x",
        "more.zip": b"x",
        "cats/@eaDir/a.png/SYNOPHOTO_THUMB_M.jpg": b"x",
        link: b"/etc/passwd",
    }
    with opened(packed(tmp_path, entries)) as archive:
        assert [entry.name for entry in archive.pictures] == ["a.png"]
        assert archive.notes() == [
            "pictures.zip: skipped 1 archive, 2 files that are not pictures, 3 hidden files, 1 link, 1 thumbnail."
        ]


def test_names_that_lead_out_of_the_archive_stay_inside(tmp_path: Path) -> None:
    names = ["../../up.png", "/root.png", "C:\\disk\\a.png", "ok\x1b[2J.png"]
    with opened(packed(tmp_path, dict.fromkeys(names, b"x"))) as archive:
        assert [entry.name for entry in archive.pictures] == ["up.png", "root.png", "disk/a.png", "ok\\x1b[2J.png"]
    assert safe_name("../..") == safe_name("") == "picture"


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_equal_names_are_told_apart_and_each_keeps_its_own_bytes(tmp_path: Path) -> None:
    path = tmp_path / "pictures.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for data in (b"one", b"two"):
            archive.writestr("a.png", data)
        archive.writestr("A.png", b"three")
    with opened(path) as pictures:
        assert [entry.name for entry in pictures.pictures] == ["a.png", "a (2).png", "A (3).png"]
        assert [pictures.read(entry) for entry in pictures.pictures] == [b"one", b"two", b"three"]


# Too much


def test_a_picture_is_read_up_to_the_limit_only_and_then_refused(tmp_path: Path) -> None:
    with opened(packed(tmp_path, {"a.png": bytes(1_000), "b.png": bytes(1_001), "c.png": bytes(10**7)})) as archive:
        assert len(archive.read(archive.pictures[0])) == 1_000
        assert error_of(archive, 1).code == error_of(archive, 2).code == "too_large"


def test_a_header_that_claims_a_small_size_is_not_believed(tmp_path: Path) -> None:
    path = packed(tmp_path, {"a.png": bytes(10**6)})
    data = path.read_bytes().replace(struct.pack("<L", 10**6), struct.pack("<L", 10))
    path.write_bytes(data)
    with opened(path) as archive:
        assert error_of(archive).code in ("too_large", "truncated")


def test_all_pictures_together_are_limited(tmp_path: Path) -> None:
    with opened(packed(tmp_path, {f"{number}.png": bytes(900) for number in range(5)})) as archive:
        for entry in archive.pictures[:3]:
            archive.read(entry)
        assert error_of(archive, 3).code == error_of(archive, 4).code == "too_large"


def test_pictures_over_the_limit_are_left_out(tmp_path: Path) -> None:
    with opened(packed(tmp_path, {f"{number}.png": b"x" for number in range(7)})) as archive:
        assert len(archive.pictures) == 5
        assert archive.notes() == ["pictures.zip: skipped 2 pictures over the limit."]


def test_a_list_of_entries_that_would_fill_the_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = packed(tmp_path, {f"{number:0100}.txt": b"" for number in range(100)})

    with pytest.raises(PictureError) as caught:
        opened(path)
    assert caught.value.code == "too_large"


# Damaged, encrypted, odd


@pytest.mark.parametrize("data", [None, b"", b"PK\x03\x04", b"no archive at all", b"PK\x05\x06" + b"\xff" * 18])
def test_missing_or_non_zip_raises_picture_error(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "pictures.zip"
    if data is not None:
        path.write_bytes(data)

    with pytest.raises(PictureError) as caught:
        opened(path)
    assert caught.value.code in (("unreadable",) if data is None else ("truncated", "too_large"))
    assert "pictures.zip" in caught.value.message


def encrypted(data: bytes) -> bytes:
    entry = data.find(b"PK\x01\x02") + 8  # the flags of the first entry in the central directory
    return data[:entry] + bytes([data[entry] | 1]) + data[entry + 1 :]


@pytest.mark.parametrize(
    ("change", "code"),
    [(encrypted, "unsupported"), (lambda data: data.replace(b"first picture", b"first pictuRE"), "truncated")],
    ids=["encrypted", "wrong checksum"],
)
def test_a_picture_that_cannot_be_read_is_refused_and_the_next_is_read(
    tmp_path: Path, change: Callable[[bytes], bytes], code: str
) -> None:
    path = packed(tmp_path, {"a.png": b"first picture", "b.png": b"second"}, method=zipfile.ZIP_STORED)
    path.write_bytes(change(path.read_bytes()))
    with opened(path) as archive:
        assert error_of(archive).code == code
        assert archive.read(archive.pictures[1]) == b"second"


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_methods_that_unpack_without_bounds_are_refused(tmp_path: Path, method: int) -> None:
    with opened(packed(tmp_path, {"a.png": bytes(10**6)}, method=method)) as archive:
        assert error_of(archive).code == "unsupported"


# Files, folders and zips on the Batch tab become one list of pictures, with notes about skipped files.

FILE_LIMITS = ServiceLimits(max_picture_bytes=1_000)


@pytest.fixture
def folder() -> Iterator[Path]:
    with private_uploads() as folder:
        yield folder


def files_of(uploads: Sequence[Upload], *, max_pictures: int = MAX_PICTURES) -> closing[BatchFiles]:
    return closing(BatchFiles(uploads, limits=FILE_LIMITS, max_pictures=max_pictures))


def upload(folder: Path, name: str, data: bytes = b"x", *, shown: str = "") -> Upload:
    path = folder / name
    path.write_bytes(data)
    return Upload(path=str(path), name=shown or name)


def zipped(folder: Path, name: str, names: list[str]) -> Upload:
    path = packed(folder, {entry: str(number).encode() for number, entry in enumerate(names)}, file=name)
    return Upload(path=str(path), name=name)


def code_of(files: BatchFiles, number: int = 0) -> str:
    with pytest.raises(PictureError) as caught:
        files.pictures[number].read()
    return caught.value.code


def test_files_and_the_pictures_of_zips_come_in_their_order_under_unique_names(folder: Path) -> None:
    uploads = [upload(folder, "a.png"), zipped(folder, "more.ZIP", ["a.png", "cats/b.jpg"]), upload(folder, "notes")]

    with files_of(uploads) as files:
        assert [file.name for file in files.pictures] == ["a.png", "a (2).png", "cats/b.jpg", "notes"]
        assert [file.read() for file in files.pictures] == [b"x", b"0", b"1", b"x"]


def test_of_a_folder_only_pictures_count(folder: Path) -> None:
    names = ["a.png", "b.txt", ".hidden.png", "c.webp", "d.heic", "@eaDir/a.png/T.jpg"]

    with files_of([upload(folder, name.replace("/", "_"), shown=f".folder/{name}") for name in names]) as files:
        assert [file.name for file in files.pictures] == [".folder/a.png", ".folder/c.webp", ".folder/d.heic"]
        assert files.notes == ["Folder: skipped 1 file that is not a picture, 1 hidden file, 1 thumbnail."]


def test_a_file_is_read_only_when_its_turn_comes_and_only_up_to_the_limit(folder: Path) -> None:
    gone, large = upload(folder, "gone.png"), upload(folder, "large.png", bytes(1_001))
    with files_of([gone, large]) as files:
        Path(gone.path).unlink()
        assert (code_of(files, 0), code_of(files, 1)) == ("missing", "too_large")


@pytest.mark.parametrize("name", ["picture.png", "archive.zip"])
def test_no_file_outside_of_the_uploads_is_opened(folder: Path, tmp_path: Path, name: str) -> None:
    foreign = upload(tmp_path, name)
    linked = folder / f"linked-{name}"
    linked.symlink_to(tmp_path / name)

    with files_of([foreign, Upload(path=str(linked), name=name)]) as files:
        assert (code_of(files, 0), code_of(files, 1)) == ("missing", "missing")


def test_a_zip_that_cannot_be_opened_stays_in_the_list_with_its_reason(folder: Path) -> None:
    with files_of([upload(folder, "broken.zip"), upload(folder, "a.png")]) as files:
        assert [file.name for file in files.pictures] == ["broken.zip", "a.png"]
        assert code_of(files) == "truncated"


def test_a_zip_without_pictures_gets_a_note(folder: Path) -> None:
    with files_of([zipped(folder, "texts.zip", ["a.txt"])]) as files:
        assert files.pictures == []
        assert files.notes == ["texts.zip: skipped 1 file that is not a picture.", "texts.zip: no pictures in it."]


def test_more_pictures_than_one_batch_takes_are_left_out(folder: Path) -> None:
    uploads = [upload(folder, f"{number}.png") for number in range(4)]

    with files_of(uploads, max_pictures=3) as files:
        assert len(files.pictures) == 3
        assert files.notes == ["One batch takes 3 pictures; 1 more were left out."]


def test_names_are_those_of_the_browser_made_printable_and_relative(folder: Path) -> None:
    uploads = [
        upload(folder, "a", shown="../../etc/x\x1b.png"),
        upload(folder, "b", shown="C:\\pictures\\été.png"),
    ]
    with files_of(uploads) as files:
        assert [file.name for file in files.pictures] == ["etc/x\\x1b.png", "pictures/été.png"]
