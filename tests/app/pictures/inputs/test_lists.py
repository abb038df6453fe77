"""List files: one name per line."""

import io
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_adapter.app.pictures.inputs import (
    InputsError,
    InputSpec,
    PictureInput,
    check_inputs,
    count_inputs,
    read_inputs,
)
from llama_adapter.app.pictures.inputs.fields import spelt_path
from llama_adapter.app.pictures.inputs.json_sets import find_picture
from llama_adapter.app.pictures.inputs.lines import MAX_LINE_BYTES, Unmarked, split_lines
from tests.app.pictures.inputs.files import error_codes, fill, message


class Dripping(io.BytesIO):
    """A pipe with a slow writer: each read gives a few bytes."""

    def __init__(self, data: bytes, size: int = 1) -> None:
        super().__init__(data)
        self._size = size

    def read1(self, _: int | None = -1, /) -> bytes:
        return super().read1(self._size)


def listed(folder: Path, content: bytes) -> list[PictureInput]:
    path = folder / "list.txt"
    path.write_bytes(content)
    return list(read_inputs(InputSpec(lists=(str(path),))))


@pytest.mark.parametrize("content", [b"", b"\n# nothing\n"])
def test_a_list_without_names_is_an_error(tmp_path: Path, content: bytes) -> None:
    (item,) = listed(tmp_path, content)
    assert "which has none" in message(item)


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("one", "one.png"),
        ("Photo 10.15", "Photo 10.15.JPG"),
        ("two", "two"),  # of two pictures, neither is chosen
        ("one.pdf", "one.pdf"),
        ("sub\\e%CC%81", "sub/\u00e9.png"),  # all spellings at once
        ("sub\\b.png", "sub\\b.png"),  # as it stands
        ("s3:\\a", "s3:/a.png"),
        ("s3://a", "s3://a"),
        ("sub/e\u0301.png", "sub/\u00e9.png"),  # as macOS writes it
        ("sub/\u00f6.png", "sub/o\u0308.png"),
        ("img", "img.jpg"),  # case counts
        ("both", "both.png"),
        ("Dir", "Dir.png"),
        ("a%20b.png", "a b.png"),
        ("BOTH.jpg", "BOTH.jpg"),
    ],
)
def test_a_name_may_lack_the_suffix_of_the_only_picture(
    name: str, right: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, "one.png", "Photo 10.15.JPG", "two.png", "two.jpg", "one.pdf.png", "sub/\u00e9.png", "s3:/a.png")
    fill(tmp_path, "sub/o\u0308.png", "img.jpg", "IMG.png", "both.png", "BOTH.PNG", "Dir.png", "DIR/x.png")
    fill(tmp_path, "A%20B.png", "a b.png", "sub\\b.png")
    assert spelt_path(name, root=str(tmp_path)).removeprefix(f"{tmp_path}/") == right
    monkeypatch.chdir(tmp_path)
    assert spelt_path(name, root="") == right


def test_a_picture_without_suffix_is_not_looked_for_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "images/1.png", "more/1.png")
    looked, lexists = list[str](), os.path.lexists
    noting = lambda path: looked.append(os.path.relpath(path, tmp_path)) or lexists(path)  # noqa: E731 - an argument
    monkeypatch.setattr(os.path, "lexists", noting)

    assert find_picture("1", "none", "images", "more", folders=[str(tmp_path)]) == str(tmp_path / "images" / "1.png")
    assert looked[:2] == ["none/1", "images/1"]
    assert {os.path.dirname(path) for path in looked[2:]} == {"images"}
    looked.clear()
    assert spelt_path("9.png", root=str(tmp_path)) == f"{tmp_path}/9.png"
    assert looked == []


def test_a_line_of_megabytes_is_one_error_and_the_next_line_is_read(tmp_path: Path) -> None:
    items = listed(tmp_path, b"a.jpg\n" + b"x" * (3 * MAX_LINE_BYTES) + b"\nb.jpg")
    assert error_codes(items) == [None, "list", None]
    assert items[1].label == f"{tmp_path}/list.txt:2"


def test_stdin_is_read_as_it_comes_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as file, os.fdopen(writing, "wb", buffering=0) as sender:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=file))
        spec = InputSpec(lists=("-",))
        check_inputs(spec)
        assert count_inputs(spec) is None
        sender.write(b"a.jpg\nb.")
        items = read_inputs(spec)
        assert next(items).source == "a.jpg"
        sender.write(b"jpg\n")
        assert next(items).source == "b.jpg"


@pytest.fixture
def drip(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], list[PictureInput]]:
    """Reads a list from stdin, which gives one byte at a time."""

    def drip(content: bytes) -> list[PictureInput]:
        opened = lambda path, what: nullcontext(Unmarked(Dripping(content)))  # noqa: E731 - an argument
        monkeypatch.setattr("llama_adapter.app.pictures.inputs.reading.opened_lines", opened)
        return list(read_inputs(InputSpec(lists=("-",))))

    return drip


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b"b.jpg\nno/such file .png \n\na.jpg\n  \n*.png", ["b.jpg", "no/such file .png ", "a.jpg", "*.png"]),
        (b"# pictures\n#1.jpg\n#\n./# 2.jpg\na # b.jpg\n", ["#1.jpg", "./# 2.jpg", "a # b.jpg"]),  # comments: `# `
        (b"a.jpg\0two\nlines.jpg\0# a.jpg\0 b.jpg\r\0", ["a.jpg", "two\nlines.jpg", "# a.jpg", " b.jpg\r"]),
        (b"\xef\xbb\xbfa.jpg\r\nb.jpg\r\n", ["a.jpg", "b.jpg"]),
        ("a.jpg\r\nü.jpg\r\n".encode("utf-16"), ["a.jpg", "ü.jpg"]),
        (b"a.jpg\rb.jpg\r", ["a.jpg", "b.jpg"]),
        (b"caf\xe9.jpg", [os.fsdecode(b"caf\xe9.jpg")]),
    ],
)
def test_each_line_is_a_name_as_it_stands_however_its_bytes_come(
    drip: Callable[[bytes], list[PictureInput]], tmp_path: Path, content: bytes, names: list[str]
) -> None:
    for items in (listed(tmp_path, content), drip(content)):
        assert [item.source for item in items] == [item.label for item in items] == names
        assert {item.root for item in items} == {None}


def test_a_null_character_after_a_line_end_makes_both_parts_of_one_name(tmp_path: Path) -> None:
    assert [item.source for item in listed(tmp_path, b"two\nlines.jpg\0")] == ["two\nlines.jpg"]  # like find -print0


@pytest.mark.parametrize("content", [b"\xff\xd8\xff\xe0\0\x10JFIF\0\n", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"])
def test_a_list_that_is_something_else_is_refused(
    drip: Callable[[bytes], list[PictureInput]], tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "photo.jpg").write_bytes(content)
    with pytest.raises(InputsError):
        check_inputs(InputSpec(lists=(str(tmp_path / "photo.jpg"),)))
    with pytest.raises(InputsError):
        drip(content)


def test_pipes_are_left_for_the_reading(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    spec = InputSpec(lists=(str(tmp_path / "pipe"),))
    check_inputs(spec)  # would block if it opened the pipe, which has no writer
    assert count_inputs(spec) is None


def test_a_list_that_cannot_be_read_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("none.txt", "", "null\0"):
        spec = InputSpec(lists=(str(tmp_path / name),))
        with pytest.raises(InputsError):
            check_inputs(spec)
        with pytest.raises(InputsError):
            list(read_inputs(spec))
    with pytest.raises(InputsError, match="more than once"):
        check_inputs(InputSpec(lists=("-", "-")))
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
