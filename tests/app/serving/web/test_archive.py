"""Archives: pictures are read one by one. Nothing is trusted, unpacked to disk or skipped silently."""

import os
import stat
import struct
import zipfile
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.serving.web.archive import Archive, ArchiveLimits, safe_name
from llama_adapter.vision.errors import PictureError

LIMITS = ArchiveLimits(max_entry_bytes=1_000, max_entries=5, max_total_bytes=3_000, max_directory_bytes=4_096)


def packed(tmp_path: Path, entries: Mapping[Any, bytes], *, method: int = zipfile.ZIP_DEFLATED) -> Path:
    path = tmp_path / "pictures.zip"
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


# Names


def test_a_name_with_nothing_in_it_is_called_picture() -> None:
    assert safe_name("../..") == safe_name("") == "picture"
