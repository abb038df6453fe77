"""Names of pictures: as text, and as places."""

import os
from pathlib import Path

from llama_adapter.app.pictures.names import UniqueNames, name_as_text, picture_key, place_of

RAW = os.fsdecode(b"inv\xff\xfe\x80.png")


def test_as_text_only_undecoded_bytes_are_escaped() -> None:
    assert name_as_text(RAW) == r"inv\xff\xfe\x80.png"
    assert name_as_text("half \ud83d.png") == r"half \ud83d.png"
    assert name_as_text("9.41\u202fAM\n.png") == "9.41\u202fAM\n.png"


def test_spellings_of_a_path_have_one_key_and_those_of_an_address_have_two() -> None:
    assert picture_key("./b/../a.png") == picture_key(os.path.abspath("a.png")) != picture_key("b/a.png")
    assert picture_key("s3://bucket/./a.png") != picture_key("s3://bucket/a.png")
    assert picture_key(r"9.41\u202fAM.png") != picture_key("9.41\u202fAM.png")


def test_a_place_follows_links_to_folders_and_none_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.png").symlink_to("/etc/passwd")
    (tmp_path / "link").symlink_to("real")

    assert place_of(str(tmp_path / "link" / "a.png")) == os.path.realpath(tmp_path / "real") + "/a.png"
    assert [place_of(name) for name in ("\0/a.png", "\ud800/a.png")] == ["\0/a.png", "\ud800/a.png"]


def test_a_thousand_equal_names_are_told_apart_by_a_few_thousand_comparisons() -> None:
    asked: list[str] = []
    names = UniqueNames(lambda name: (asked.append(name), name.casefold())[1])

    assert len({names.take(name) for name in ("a.png", "A.png") * 500}) == 1000
    assert len(asked) < 4000
