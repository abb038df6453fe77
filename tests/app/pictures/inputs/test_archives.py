"""Tar archives: pictures and texts of samples, without extracting anything."""

import gzip
import io
import json
import os
import tarfile
import tracemalloc
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.pictures.inputs import InputSpec, PictureInput, read_inputs
from llama_adapter.app.pictures.inputs.archives import MAX_TEXT_BYTES, archive_inputs
from llama_adapter.app.pictures.inputs.items import LeftOut
from llama_adapter.app.pictures.inputs.tar_members import opened_tar
from llama_adapter.vision.errors import PictureError
from tests.app.pictures.inputs.files import error_codes, message, tar_bytes

SAMPLES = {
    "0001.jpg": b"one",
    "0001.txt": b" a cat\n",
    "0001.json": json.dumps({"width": 3, "tags": ["x"], "who": "Ann"}).encode(),
    "0002.cls": b"7 0.5 0.5 0.25 1",  # boxes are in .txt only
    "0002.PNG": b"two" * 1000,
    "sub/0002.png": b"three",
}


def archive(folder: Path, data: bytes, *, name: str = "some.tar") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def items_of(path: Path) -> list[PictureInput]:
    return list(read_inputs(InputSpec(paths=(str(path),))))


def content(item: PictureInput) -> bytes:
    source = item.source
    assert not isinstance(source, str)
    return source if isinstance(source, bytes) else source.read(max_bytes=10**6)


def header(name: str, *, kind: bytes = tarfile.REGTYPE, size: int = 0, target: str = "") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, target
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    ("name", "mode"),
    [("s.tar", "w"), ("s.TGZ", "w:gz"), ("s.tar.bz2", "w:bz2"), ("s.tar.xz", "w:xz"), ("s.tar", "w:gz")],
)
def test_members_that_share_a_name_are_one_sample(tmp_path: Path, name: str, mode: str) -> None:
    path = archive(tmp_path, tar_bytes(SAMPLES, mode=mode), name=name)
    items = items_of(path)
    assert [(item.label, dict(item.columns), content(item)) for item in items] == [
        (f"{path}/0001.jpg", {"txt": "a cat", "width": "3", "who": "Ann"}, b"one"),
        (f"{path}/0002.PNG", {"cls": "7 0.5 0.5 0.25 1"}, b"two" * 1000),
        (f"{path}/sub/0002.png", {}, b"three"),
    ]
    assert {item.root for item in items} == {str(path)}


@pytest.mark.parametrize(
    ("members", "columns"),
    [
        ([("a.png", b"x"), ("a.png.txt", b"1"), ("a.png", b"x"), ("a.png.txt", b"2")], [{"txt": "1"}, {"txt": "2"}]),
        ([("a.json", b'{"v": 1}'), ("a.png", b"x")] * 2, [{"v": "1"}] * 2),
        (
            [("a.png", b"x"), ("a.png.txt", b"1"), ("a.txt", b"0"), ("a.json", b'{"v": 1}')],
            [{"v": "1", "txt": "1"}],
        ),
    ],
)
def test_a_picture_has_the_texts_of_its_names_in_its_own_sample(
    tmp_path: Path, members: list[tuple[str, bytes]], columns: list[dict[str, str]]
) -> None:
    assert [dict(item.columns) for item in items_of(archive(tmp_path, tar_bytes(members)))] == columns


def test_a_picture_of_a_replaced_archive_is_an_error_and_a_copy_of_it_is_not(tmp_path: Path) -> None:
    one, two = "d" * 120 + ".png", "b.png"
    path = archive(tmp_path, tar_bytes({one: b"one", two: b"two"}))
    items = items_of(path)
    os.utime(path, (0, 0))
    assert [content(item) for item in items] == [b"one", b"two"]

    archive(tmp_path, tar_bytes({two: b"two", one: b"one"}))
    for item in items:
        with pytest.raises(PictureError) as caught:
            content(item)
        assert caught.value.code == "unreadable"


def test_hidden_members_and_those_of_the_writer_are_left_out(tmp_path: Path) -> None:
    names = ["./._a.png", ".cache/b.png", "__key__", "x/__thumb.png__", "./ok.png", "notes.md"]
    (item,) = items_of(archive(tmp_path, tar_bytes(dict.fromkeys(names, b"x"))))
    assert item.label == f"{tmp_path}/some.tar/ok.png"


def test_names_are_only_shown_and_links_and_devices_are_not_followed(tmp_path: Path) -> None:
    data = (
        header("/etc/a.png") + header("../../b.png") + header("c.png", kind=tarfile.SYMTYPE, target="/etc/passwd")
        + header("d.png", kind=tarfile.LNKTYPE, target="b.png") + header("e.png", kind=tarfile.CHRTYPE)
        + header("f.png", kind=tarfile.DIRTYPE) + header("link", kind=tarfile.SYMTYPE, target="x") + bytes(1024)
    )  # fmt: skip
    items = items_of(archive(tmp_path, data))
    names = ["/etc/a.png", "../../b.png", "c.png", "d.png", "e.png"]
    assert [item.label.removeprefix(f"{tmp_path}/some.tar/") for item in items] == names
    assert error_codes(items) == [None, None, *["unsupported"] * 3]
    assert "a link or a device" in message(items[2])


def test_sparse_members_are_errors_and_what_follows_them_is_found(tmp_path: Path) -> None:
    old = bytearray(header("a.png", kind=tarfile.GNUTYPE_SPARSE, size=600))
    old[482] = 1  # the map continues in another block
    old[148:156] = b"%06o\0 " % (sum(old[:148]) + 8 * 32 + sum(old[156:]))
    pax = b"30 GNU.sparse.name=real/b.png\n"
    data = bytes(old) + bytes(512) + bytes(1024)
    data += (
        header("x", kind=tarfile.XHDTYPE, size=len(pax)) + pax.ljust(512, b"\0") + header("0/b", size=1) + bytes(512)
    )
    items = items_of(archive(tmp_path, data + tar_bytes({"c.png": b"c"})))
    assert [item.label.removeprefix(f"{tmp_path}/some.tar/") for item in items] == ["a.png", "real/b.png", "c.png"]
    assert error_codes(items) == ["unsupported", "unsupported", None]
    assert content(items[2]) == b"c"


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
def test_a_torn_archive_gives_what_is_there_and_then_one_error(tmp_path: Path, mode: str) -> None:
    whole = tar_bytes({f"{number}.png": bytes([number]) * 700 for number in range(8)}, mode=mode)
    for num_bytes in range(0, len(whole) if mode != "w" else 8 * 1536, 211):
        items = items_of(archive(tmp_path, whole[:num_bytes], name="torn.tar"))
        assert error_codes(items) == [*[None] * (len(items) - 1), "archive"]
        assert [content(item) for item in items[:-1]] == [bytes([number]) * 700 for number in range(len(items) - 1)]
        assert "torn.tar" in message(items[-1])


def test_a_damaged_header_is_not_taken_for_the_end(tmp_path: Path) -> None:
    whole = bytearray(tar_bytes({f"{number}.png": b"x" for number in range(4)}))
    whole[2 * 1024 + 7] ^= 1
    items = items_of(archive(tmp_path, bytes(whole)))
    assert error_codes(items) == [None, None, "archive"]
    assert "no header at byte 2,048; pictures found before that: 2)" in message(items[2])


def extended(kind: bytes, text: bytes, *, size: int | None = None) -> bytes:
    """A header that applies to the next member."""
    padded = text.ljust(-(-len(text) // 512) * 512, b"\0")
    return header("x", kind=kind, size=len(text) if size is None else size) + padded


UNUSABLE = {
    "empty": b"",
    "text": b"not a tar" * 100,
    "zeros": bytes(1024),
    "no picture": tar_bytes({"a.txt": b"x"}),
    "Zstandard": b"\x28\xb5\x2f\xfd" + bytes(100),
    "gzip": b"\x1f\x8b" + b"x" * 100,
    "large header": extended(tarfile.XHDTYPE, b"", size=2**40),
    "negative name": extended(tarfile.GNUTYPE_LONGNAME, b"", size=-1),
    "pax": extended(tarfile.XHDTYPE, b"99 path=a\n"),
    "long size": extended(tarfile.XHDTYPE, b"5011 size=" + 5000 * b"9" + b"\n") + header("a.png"),
    "negative pax size": extended(tarfile.XHDTYPE, b"11 size=-1\n") + header("a.png"),
    "negative size": header("a.png", size=-5),
    "large size": header("a.png", size=2**50),
}


def test_an_unusable_archive_is_one_error(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    said = {}
    for name, data in UNUSABLE.items():
        (item,) = items_of(archive(tmp_path, data))
        assert (item.label, error_codes([item])) == (f"{tmp_path}/some.tar", ["archive"])
        said[name] = message(item).partition(", but ")[2]
    assert said == snapshot


def test_an_archive_without_the_field_names_its_own_fields(tmp_path: Path) -> None:
    paths = [archive(tmp_path, tar_bytes({f"0.{name}.png": b"x"}), name=f"{name}.tar") for name in ("seg", "edge")]
    items = read_inputs(InputSpec(paths=tuple(map(str, paths)), sample_fields=("depth", "txt")))
    assert [message(item).rpartition(" ")[2] for item in items] == ["seg.png.", "edge.png."]


def test_an_archive_that_is_not_there_is_left_to_its_loading(tmp_path: Path) -> None:
    (item,) = items_of(tmp_path / "none.tar")
    assert (item.source, item.error) == (str(tmp_path / "none.tar"), None)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_joined_archives_are_read_as_one_and_other_bytes_after_the_end_are_not(
    tmp_path: Path, pack: type[bytes]
) -> None:
    data = pack(tar_bytes({"a.png": b"a"})) + pack(tar_bytes({"b.png": b"b"}) + b"anything" * 100)
    items = items_of(archive(tmp_path, data))
    assert [content(item) for item in items] == [b"a", b"b"]
    assert error_codes(items) == [None, None]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("0.json", text) for text in (b"{", b"[1]", b"[" * 10**5)),
        *(("0.txt", text) for text in (b"\xff", b"x" * (MAX_TEXT_BYTES + 1))),
    ],
)
def test_texts_that_cannot_be_used_give_no_columns(tmp_path: Path, name: str, text: bytes) -> None:
    path, left_out = archive(tmp_path, tar_bytes({"0.png": b"x", name: text, "0.cls": b"3"})), LeftOut()
    (item,) = read_inputs(InputSpec(paths=(str(path),)), left_out=left_out)
    assert (item.columns, item.error) == ({"cls": "3"}, None)
    assert left_out.note().startswith(f"texts without values that can be read: 1 (first: {path}/{name})")


def test_a_picture_above_the_limit_is_not_taken_into_memory(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with gzip.open(buffer, "wb") as file:
        file.write(header("big.png", size=8_000_000) + bytes(8_000_000) + tar_bytes({"b.png": b"b"}))
    path = archive(tmp_path, buffer.getvalue())
    tracemalloc.start()
    items = list(archive_inputs(str(path), max_bytes=1_000_000))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert error_codes(items) == ["too_large", None]
    assert peak_bytes < 3_000_000


def test_a_name_that_thousands_share_is_not_kept_to_its_end(tmp_path: Path) -> None:
    path = archive(tmp_path, tar_bytes({f"IMG.{number}.png": b"x" for number in range(200)}))
    items = read_inputs(InputSpec(paths=(str(path),)))
    first = next(items)
    path.write_bytes(path.read_bytes()[: 100 * 1024])
    assert first.label == f"{path}/IMG.0.png"
    assert 64 <= len(list(items)) < 200


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_pictures_of_one_name_are_numbered(tmp_path: Path, mode: str) -> None:
    names = ["x/a.png", "b.png", "./x/a.png", "a.png", "x/a.png", "b (2).png", "b.png", "noise.txt", "noise.txt"]
    path = archive(tmp_path, tar_bytes([(name, b"%d" % number) for number, name in enumerate(names)], mode=mode))
    items = items_of(path)

    place = f"{path}/"
    assert [(item.label.removeprefix(place), item.repeats.removeprefix(place), content(item)) for item in items] == [
        ("x/a.png", "", b"0"),
        ("b.png", "", b"1"),
        ("x/a (2).png", "x/a.png", b"2"),
        ("a.png", "", b"3"),
        ("x/a (3).png", "x/a.png", b"4"),
        ("b (2).png", "", b"5"),
        ("b (3).png", "b.png", b"6"),
    ]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_agree_with_those_of_the_standard_library_also_with_names_that_are_long_or_no_utf8(
    tmp_path: Path, format: int
) -> None:
    members = {f"{'deep/' * number}{number}.png": bytes(number * 100) for number in range(40)}
    members |= {"d" * 120 + "/" + "e" * 80 + ".jpg": b"1", "caf\udce9\n.png": b"2"}
    path = archive(tmp_path, tar_bytes(members, format=format))
    with tarfile.open(path) as theirs, opened_tar(str(path)) as ours:
        expected = [(member.name, member.size, member.offset_data) for member in theirs]
        assert [(member.name, member.num_bytes, member.offset) for member in ours.members()] == expected
    assert [(item.label.removeprefix(f"{path}/"), content(item)) for item in items_of(path)] == [*members.items()]
