"""Files and folders: each picture is one item."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from llama_adapter.app.pictures.inputs import PictureInput, count_in_sub_folders, natural_key
from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.image import load_picture
from tests.app.pictures.inputs.files import fill, locked, named


def names_below(folder: Path, *, recursive: bool = False) -> list[str]:
    return [os.path.relpath(item.label, folder) for item in named(folder, recursive=recursive)]


def code_of(item: PictureInput) -> str:
    with pytest.raises(PictureError) as caught:
        load_picture(item.label)
    return caught.value.code


def test_files_keep_their_order_and_may_have_any_suffix_and_repeat(tmp_path: Path) -> None:
    fill(tmp_path, "b.jpg", "a.data", ".hidden.png")
    paths = [str(tmp_path / name) for name in ("b.jpg", "a.data", ".hidden.png", "b.jpg")]
    assert [(item.source, item.label, item.root) for item in named(*paths)] == [(path, path, None) for path in paths]


def test_a_folder_gives_its_pictures_in_natural_order_and_nothing_else(tmp_path: Path) -> None:
    fill(tmp_path, "pic_10.png", "pic_2.png", "Pic_1.JPG", "pic_02.png", "other.jpeg", "9.webp", "10.webp")
    fill(tmp_path, ".b.png", "._a.png", "notes.txt", "png", "c.png.part", "sub/d.png", "folder.png/e.gif")
    fill(tmp_path, "z\n.png")
    expected = ["9.webp", "10.webp", "other.jpeg", "Pic_1.JPG", "pic_02.png", "pic_2.png", "pic_10.png", "z\n.png"]
    assert names_below(tmp_path) == expected


def test_sub_folders_are_searched_on_request_but_not_hidden_ones_nor_links(tmp_path: Path) -> None:
    folder = fill(tmp_path / "top", "z.png", "sub_10/a.png", "sub_2/a.png", "sub_2/deep/b.tif", ".cache/c.png")
    (folder / "circle").symlink_to(folder, target_is_directory=True)
    (folder / "linked.png").symlink_to(folder / "z.png")
    expected = ["linked.png", "sub_2/a.png", "sub_2/deep/b.tif", "sub_10/a.png", "z.png"]
    assert names_below(folder, recursive=True) == expected
    assert {item.root for item in named(folder, recursive=True)} == {str(folder)}


def test_pictures_that_recursive_would_add_are_counted(tmp_path: Path) -> None:
    folder = fill(tmp_path / "top", "a.png", "sub/b.png", "sub/notes.txt", "sub/deep/c.png", "other/d.jpg", ".e/f.png")
    (folder / "circle").symlink_to(folder, target_is_directory=True)

    assert count_in_sub_folders(str(folder), searched=(), at_most=100) == 3
    assert count_in_sub_folders(str(folder), searched=(), at_most=2) == 2
    assert count_in_sub_folders(str(folder), searched={str(folder / "sub")}, at_most=100) == 2
    assert count_in_sub_folders(str(folder / "a.png"), searched=(), at_most=100) == 0


def test_every_named_path_gives_an_item_even_when_nothing_is_there(tmp_path: Path) -> None:
    empty = fill(tmp_path / "empty", "notes.txt")
    good = tmp_path / "good.png"
    Image.new("RGB", (3, 3)).save(good)
    paths: list[str | Path] = [tmp_path / "none.png", empty, good, tmp_path / "none", "", "null\0character"]
    items = named(*paths)
    assert [item.source for item in items] == [os.fspath(path) for path in paths]
    codes = [code_of(item) for item in items if item.label != str(good)]
    assert codes == ["missing", "not_a_file", "missing", "missing", "missing"]


def test_what_a_folder_lists_but_cannot_give_stays_an_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dangling.png").symlink_to(tmp_path / "gone.png")
    (tmp_path / "circle.png").symlink_to(tmp_path / "circle.png")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "IMG_1.HEIC").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")  # in the form that phones write
    (tmp_path / "IMG_2.MOV").write_bytes(b"\0\0\0\x14ftypqt  ")
    monkeypatch.setattr("llama_adapter.vision.image._reads_heic", lambda: False)
    assert {item.label.rsplit("/", 1)[1]: code_of(item) for item in named(tmp_path)} == {
        "circle.png": "unreadable",
        "dangling.png": "missing",
        "IMG_1.HEIC": "unsupported",
        "pipe.png": "not_a_file",
    }


def test_a_folder_that_cannot_be_listed_stays_an_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "a.png", "locked/b.png")
    locked(monkeypatch, "locked")
    assert names_below(tmp_path, recursive=True) == ["a.png", "locked"]
    assert names_below(tmp_path / "locked") == ["."]
    assert [item.found_in for item in named(tmp_path, recursive=True)] == [(str(tmp_path),)] * 2
    assert [item.found_in for item in named(tmp_path / "locked")] == [()]


def test_a_sequence_of_avif_pictures_counts_and_its_first_frame_is_read(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (24, 16), colour) for colour in ("red", "lime")]
    frames[0].save(tmp_path / "two.AVIFS", "AVIF", save_all=True, append_images=frames[1:])
    (found,) = named(tmp_path)
    assert found.label == str(tmp_path / "two.AVIFS")
    red, green, _ = load_picture(found.label).image.getpixel((12, 8))  # type: ignore[arg-type,misc]
    assert red > 200 > 100 > green


# Natural order of names: numbers are compared by value

# File names: any characters except the null character, with many digits.
NAMES = st.text(st.one_of(st.sampled_from("0123456789aAß_. \x01"), st.characters(exclude_characters="\0")), max_size=12)


def plain_key(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """The intended order: numbers before letters, numbers by value, letters without case, then the name itself."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(0, int(part), "") if part[0] in "0123456789" else (1, 0, part.casefold()) for part in parts], name


@given(NAMES, NAMES)
def test_the_order_of_two_names_is_that_of_numbers_and_letters(one: str, other: str) -> None:
    assert (natural_key(one) < natural_key(other)) == (plain_key(one) < plain_key(other))


def test_numbers_count_by_value_whatever_their_length() -> None:
    names = ["a0", "a00", "a1", "a2", "a02", "a10", "a" + "9" * 5000, "a1" + "0" * 5000]
    assert sorted(set(names), key=natural_key) == ["a0", "a00", "a1", "a02", "a2", *names[5:]]
