"""List files: a name a line."""

import io
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_adapter.app.inputs import InputsError, InputSpec, PictureInput, check_inputs, count_inputs, read_inputs
from llama_adapter.app.inputs.lines import MAX_LINE_BYTES, split_lines
from tests.app.inputs.files import error_codes, fill, tar_bytes


class Dripping(io.BytesIO):
    """A pipe whose writer is slow: it gives a few bytes at a time."""

    def __init__(self, data: bytes, size: int = 1) -> None:
        super().__init__(data)
        self._size = size

    def read1(self, _: int | None = -1, /) -> bytes:
        return super().read1(self._size)


def listed(folder: Path, content: bytes, *, recursive: bool = False) -> list[PictureInput]:
    path = folder / "list.txt"
    path.write_bytes(content)
    return list(read_inputs(InputSpec(lists=(str(path),), recursive=recursive)))


def paths(items: list[PictureInput]) -> list[str]:
    return [item.path for item in items]


def test_each_line_is_a_name_as_it_stands(tmp_path: Path) -> None:
    items = listed(tmp_path, b"b.jpg\nno/such file .png \n\na.jpg\n  \n*.png")
    assert paths(items) == ["b.jpg", "no/such file .png ", "a.jpg", "*.png"]
    assert {item.root for item in items} == {None}


def test_comments_begin_with_a_hash_and_a_blank_so_that_files_may_begin_with_a_hash(tmp_path: Path) -> None:
    assert paths(listed(tmp_path, b"# pictures\n#1.jpg\n#\n./# 2.jpg\na # b.jpg\n")) == [
        "#1.jpg",
        "./# 2.jpg",
        "a # b.jpg",
    ]


def test_names_may_be_separated_as_find_prints_them(tmp_path: Path) -> None:
    assert paths(listed(tmp_path, b"two\nlines.jpg\0# a.jpg\0 b.jpg\r\0")) == ["two\nlines.jpg", "# a.jpg", " b.jpg\r"]


def test_lists_of_other_systems_are_read(tmp_path: Path) -> None:
    assert paths(listed(tmp_path, b"\xef\xbb\xbfa.jpg\r\nb.jpg\r\n")) == ["a.jpg", "b.jpg"]


def test_names_that_are_not_utf8_stay_as_they_are(tmp_path: Path) -> None:
    (item,) = listed(tmp_path, b"caf\xe9.jpg\n")
    assert os.fsencode(item.path) == b"caf\xe9.jpg"
    assert item.label == item.path


def test_a_line_may_name_a_folder_or_an_archive(tmp_path: Path) -> None:
    fill(tmp_path, "folder/b.png", "folder/sub/c.png")
    (tmp_path / "some.tar").write_bytes(tar_bytes({"d.png": b"d"}))
    items = listed(tmp_path, f"{tmp_path}/folder\n{tmp_path}/some.tar\n".encode(), recursive=True)
    assert [os.path.relpath(item.label, tmp_path) for item in items] == [
        "folder/b.png",
        "folder/sub/c.png",
        "some.tar/d.png",
    ]
    assert [item.root for item in items] == [str(tmp_path / "folder")] * 2 + [str(tmp_path / "some.tar")]


def test_a_line_of_megabytes_is_one_error_and_the_next_line_is_read(tmp_path: Path) -> None:
    items = listed(tmp_path, b"a.jpg\n" + b"x" * (3 * MAX_LINE_BYTES) + b"\nb.jpg")
    assert error_codes(items) == [None, "list", None]
    assert items[1].label == f"{tmp_path}/list.txt:2"


def test_an_empty_list_names_nothing(tmp_path: Path) -> None:
    assert listed(tmp_path, b"") == []


def test_stdin_is_read_as_it_comes_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as file, os.fdopen(writing, "wb", buffering=0) as sender:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=file))
        spec = InputSpec(lists=("-",))
        check_inputs(spec)
        assert count_inputs(spec) is None
        sender.write(b"a.jpg\nb.")
        items = read_inputs(spec)
        assert next(items).path == "a.jpg"
        sender.write(b"jpg\n")
        assert next(items).path == "b.jpg"


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b"a.jpg\0two\nlines.jpg\0", ["a.jpg", "two\nlines.jpg"]),
        (b"\xef\xbb\xbfa.jpg\nb.jpg\n", ["a.jpg", "b.jpg"]),
        (b"a.jpg", ["a.jpg"]),
    ],
    ids=["null characters", "byte order mark", "one line"],
)
def test_a_list_means_the_same_however_its_bytes_come(
    monkeypatch: pytest.MonkeyPatch, content: bytes, names: list[str]
) -> None:
    monkeypatch.setattr(
        "llama_adapter.app.inputs.lists.opened_lines", lambda path, what: nullcontext(Dripping(content))
    )

    assert paths(list(read_inputs(InputSpec(lists=("-",))))) == names


def test_a_list_that_is_utf16_is_refused_however_its_bytes_come(monkeypatch: pytest.MonkeyPatch) -> None:
    content = "a.jpg\n".encode("utf-16")
    monkeypatch.setattr(
        "llama_adapter.app.inputs.lists.opened_lines", lambda path, what: nullcontext(Dripping(content))
    )

    with pytest.raises(InputsError, match="UTF-16"):
        list(read_inputs(InputSpec(lists=("-",))))


@pytest.mark.parametrize("content", [b"\xff\xd8\xff\xe0\0\x10JFIF\0\n", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"])
def test_a_list_that_is_a_picture_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "photo.jpg").write_bytes(content)
    with pytest.raises(InputsError, match=r"photo\.jpg` is a picture itself"):
        check_inputs(InputSpec(lists=(str(tmp_path / "photo.jpg"),)))

    monkeypatch.setattr(
        "llama_adapter.app.inputs.lists.opened_lines", lambda path, what: nullcontext(Dripping(content))
    )
    with pytest.raises(InputsError, match="on stdin is a picture itself"):
        list(read_inputs(InputSpec(lists=("-",))))


def test_pipes_are_left_for_the_reading(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    spec = InputSpec(lists=(str(tmp_path / "pipe"),))
    check_inputs(spec)  # would wait for a writer if it opened it
    assert count_inputs(spec) is None


def test_a_list_that_cannot_be_read_is_told_before_anything_is(tmp_path: Path) -> None:
    fill(tmp_path, "wide.txt")
    (tmp_path / "wide.txt").write_text("a.jpg", encoding="utf-16")
    for name, reason in (
        ("none.txt", "no such file"),
        ("", "folder"),
        ("null\0", "no such file"),
        ("wide.txt", "UTF-16"),
    ):
        spec = InputSpec(lists=(str(tmp_path / name),))
        with pytest.raises(InputsError, match=reason):
            check_inputs(spec)
        with pytest.raises(InputsError):
            list(read_inputs(spec))
    with pytest.raises(InputsError, match="more than once"):
        check_inputs(InputSpec(lists=("-", "-")))


def test_a_closed_stdin_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputsError, match="closed"):
        list(read_inputs(InputSpec(lists=("-",))))


@given(st.lists(st.binary(max_size=5).filter(lambda line: b"\n" not in line)), st.integers(1, 7))
def test_lines_are_the_same_however_the_bytes_come(lines: list[bytes], size: int) -> None:
    data = b"\n".join(lines)
    expected = data.split(b"\n") if data else []
    if expected and not expected[-1]:
        expected.pop()
    assert list(split_lines(Dripping(data, size))) == list(enumerate(expected, start=1))
