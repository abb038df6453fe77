"""Names of pictures: as text, as escaped by earlier versions, and how escaped names are found again."""

import os
from pathlib import Path

import pytest

from llama_adapter.app.pictures.names import escaped_name, find_escaped, name_as_text, place_of

RAW = os.fsdecode(b"inv\xff\xfe\x80.png")


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("été 图 🎈.png", "été 图 🎈.png"),
        ("9.41\u202fAM.png", r"9.41\u202fAM.png"),
        ("a\u00a0b\u3000c.png", r"a\xa0b\u3000c.png"),
        ("می\u200cخواهم.png", r"می\u200cخواهم.png"),
        ("a\n\t\x1b.png", r"a\n\t\x1b.png"),
        (RAW, r"inv\xff\xfe\x80.png"),
        ("half \ud83d.png", r"half \ud83d.png"),
    ],
)
def test_the_escaped_form_is_that_of_earlier_records(name: str, escaped: str) -> None:
    assert escaped_name(name) == escaped


def test_as_text_only_undecoded_bytes_are_escaped() -> None:
    assert name_as_text(RAW) == r"inv\xff\xfe\x80.png"
    assert name_as_text("half \ud83d.png") == r"half \ud83d.png"
    assert name_as_text("9.41\u202fAM\n.png") == "9.41\u202fAM\n.png"


def test_a_file_is_found_by_its_escaped_name_also_in_a_folder_that_has_one(tmp_path: Path) -> None:
    picture = tmp_path / "a\u00a0folder" / "9.41\u202fAM.png"
    picture.parent.mkdir()
    picture.touch()

    assert find_escaped(escaped_name(str(picture))) == str(picture)
    assert find_escaped(str(tmp_path / r"gone\u202f.png")) == str(tmp_path / r"gone\u202f.png")
    for name in ("\\\0.png", "\\" + "/a" * 5000):
        assert find_escaped(name) == name


def test_a_file_of_that_very_name_is_meant_itself(tmp_path: Path) -> None:
    literal, raw = tmp_path / r"inv\xff\xfe\x80.png", tmp_path / RAW
    raw.touch()
    assert find_escaped(str(literal)) == str(raw)
    literal.touch()
    assert find_escaped(str(literal)) == str(literal)


def test_two_names_with_one_escaped_form_stay_escaped(tmp_path: Path) -> None:
    (tmp_path / "a\u00a0b.png").touch()
    Path(os.fsdecode(bytes(tmp_path) + b"/a\xa0b.png")).touch()

    assert find_escaped(str(tmp_path / r"a\xa0b.png")) == str(tmp_path / r"a\xa0b.png")


def test_a_place_follows_links_to_folders_and_none_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.png").symlink_to("/etc/passwd")
    (tmp_path / "link").symlink_to("real")

    assert place_of(str(tmp_path / "link" / "a.png")) == os.path.realpath(tmp_path / "real") + "/a.png"
    assert [place_of(name) for name in ("\0/a.png", "\ud800/a.png")] == ["\0/a.png", "\ud800/a.png"]
