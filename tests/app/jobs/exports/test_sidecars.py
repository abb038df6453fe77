"""Text files for pictures: written completely, in the right place, and never over other files."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.jobs.exports.sidecars import MAX_TOLD, XMP, SidecarFiles
from llama_adapter.app.pictures.inputs.xmp import MAX_BYTES, description_of, with_description
from tests.app.pictures.inputs.files import fill


def texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.txt")) if path.is_file()}


def write(
    out: Path | None, pairs: dict[str, str], *, below: Sequence[Path] = (Path("/"),), **settings: Any
) -> SidecarFiles:
    with SidecarFiles(None if out is None else str(out), below=list(map(str, below)), **settings) as files:
        for picture, text in pairs.items():
            files.write(picture, text)
    return files


def pictures(folder: Path, *names: str) -> list[str]:
    fill(folder, *names)
    return [str(folder / name) for name in names]


def test_beside_a_picture_that_is_not_there_nothing_is_written(tmp_path: Path) -> None:
    names = [str(tmp_path / "a.png"), str(tmp_path / "b.tar/c.png"), "\0", "\ud800/d.png", "..", ".", ""]
    files = write(None, dict.fromkeys(names, "text"))

    assert texts(tmp_path) == {}
    assert files.refusals.count == len(names)
    assert "name a folder as --out" in files.refusals.told[0]


@pytest.mark.parametrize(
    "places",
    [
        {"pics/a.png": "pics/a.txt", "shots.tar/sub/b.png": "shots.tar/sub/b.txt", "/abs/c.png": "abs/c.txt"},
        {"a.png": "a.txt", "a.jpg": "a.jpg.txt", "A.gif": "A.gif.txt", "b/a.png": "b/a.txt"},
        {os.fsdecode(b"inv\xff.png"): "inv%FF.txt", os.fsdecode(b"inv\xfe.png"): "inv%FE.txt"},
    ],
    ids=["folders", "equal stems", "undecoded bytes"],
)
def test_texts_in_a_folder_are_named_after_their_pictures(tmp_path: Path, places: dict[str, str]) -> None:
    write(tmp_path / "out", {picture: f"{picture!a} \ud800" for picture in places})

    assert texts(tmp_path / "out") == {place: f"{picture!a} \\ud800\n" for picture, place in places.items()}


def test_no_name_leads_out_of_the_folder(tmp_path: Path) -> None:
    names = ["../x.png", "/etc/y.png", "a/../../z.png", "..", "\0.png", "-rf.png", "w\nx.png"]
    write(tmp_path / "out", dict.fromkeys(names, "text"))

    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert len(texts(tmp_path / "out")) == len(names)


def test_a_link_below_the_folder_is_not_followed(tmp_path: Path) -> None:
    for name in ("elsewhere", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "out" / "pics").symlink_to(tmp_path / "elsewhere")
    files = write(tmp_path / "out", {"pics/a.png": "one", "b.png": "two"}, existing="replace")

    assert os.listdir(tmp_path / "elsewhere") == []
    assert (tmp_path / "out" / "b.txt").read_text() == "two\n"
    assert files.refusals.count == 1


def test_a_link_in_the_place_of_a_text_is_replaced_by_force_and_what_it_names_stays(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (picture,) = pictures(tmp_path, "a.png")
    (tmp_path / "a.txt").symlink_to(tmp_path / "precious")

    assert write(None, {picture: "mine"}).refusals.count == 1
    assert write(None, {picture: "mine"}, existing="replace").num_written == 1
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "a.txt").is_symlink()


@pytest.mark.parametrize(
    ("existing", "second", "counts"),
    [
        ("refuse", "shapeart", (1, 1, 0)),
        ("keep", "shapeart", (1, 1, 1)),
        ("replace", "a star", (2, 1, 0)),
        ("extend", "shapeart, a star", (2, 1, 0)),
    ],
)
def test_existing_texts_are_kept_replaced_or_extended(
    tmp_path: Path, existing: str, second: str, counts: tuple[int, int, int]
) -> None:
    first, other, third = pictures(tmp_path, "a.png", "b.png", "c.png")
    (tmp_path / "a.txt").write_text("a star")
    (tmp_path / "b.txt").write_text("shapeart\n")
    wanted = dict.fromkeys([first, other, third], "a star")
    files = write(None, wanted, existing=existing)

    assert [text.strip() for text in texts(tmp_path).values()] == ["a star", second, "a star"]
    assert (files.num_written, files.num_same, files.num_kept) == counts
    refused = [f"error: {other}: `b.txt` is there already with other content; see --existing"]
    assert files.refusals.lines() == (refused if existing == "refuse" else [])
    written = {path.name: path.stat() for path in tmp_path.iterdir()}
    again = write(None, wanted, existing=existing)
    assert (again.num_written, again.num_kept, again.refusals.lines()) == (0, counts[2], files.refusals.lines())
    for name, before in written.items():
        after = (tmp_path / name).stat()
        assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("bobcat\n", "bobcat, cat\n"),
        ("cat \r\n\n", "cat \r\n\n"),
        ("a cat, big, fur", "a cat, big, fur, cat\n"),
        ("black cat\ncat, big\n", "black cat\ncat, big\n"),
        ("one, cat, two", "one, cat, two"),
        ("a big, cat\n sits, two", "a big, cat\n sits, two"),
    ],
)
def test_a_text_is_extended_unless_it_has_the_part_already(tmp_path: Path, before: str, after: str) -> None:
    (picture,) = pictures(tmp_path, "a.png")
    (tmp_path / "a.txt").write_bytes(before.encode())
    for _ in range(2):
        write(None, {picture: "cat sits" if "sits" in before else "cat"}, existing="extend")
        assert (tmp_path / "a.txt").read_bytes().decode() == after


@pytest.mark.parametrize("existing", ["refuse", "keep", "extend", "replace"])
def test_a_text_that_was_written_in_lines_is_the_same_on_one(tmp_path: Path, existing: str) -> None:
    (picture,) = pictures(tmp_path, "a.png")
    (tmp_path / "a.txt").write_text("A star.\n- red\n")
    files = write(None, {picture: "A star. - red"}, existing=existing)
    is_replaced = existing == "replace"
    assert (files.num_same, files.num_written, files.refusals.count) == (not is_replaced, is_replaced, 0)
    assert (tmp_path / "a.txt").read_text() == ("A star. - red\n" if is_replaced else "A star.\n- red\n")


@pytest.mark.parametrize("existing", ["replace", "extend"])
def test_a_file_that_is_no_text_is_never_changed(tmp_path: Path, existing: str) -> None:
    first, second = pictures(tmp_path, "a.png", "b.png")
    (tmp_path / "a.txt").write_bytes(b"gr\xfcn")
    (tmp_path / "b.txt").write_bytes(b"x" * (MAX_BYTES + 1))
    told = write(None, dict.fromkeys([first, second], "a star"), existing=existing).refusals.told

    assert [one.endswith("it is not UTF-8") for one in told] == [True, True]
    assert (tmp_path / "a.txt").read_bytes() == b"gr\xfcn"


def test_an_xmp_is_extended_once_and_a_linked_one_is_not_replaced(tmp_path: Path) -> None:
    (picture,) = pictures(tmp_path, "a.png")
    (tmp_path / "a.png.xmp").write_bytes(with_description("title", None))
    for num_written in (1, 0):
        assert write(None, {picture: "a\nb"}, text_format=XMP, existing="extend").num_written == num_written
    assert description_of((tmp_path / "a.png.xmp").read_bytes()) == "title, a\nb"

    (tmp_path / "a.xmp").symlink_to("a.png.xmp")
    told = write(None, {picture: "x"}, suffix=".xmp", text_format=XMP, existing="replace").refusals.told

    assert told[0].endswith("it is a link or a folder")
    assert (tmp_path / "a.xmp").is_symlink()


def test_a_text_gets_another_suffix_and_other_names_are_counted_with_an_example(tmp_path: Path) -> None:
    names = pictures(tmp_path, "a.jpg", "a.png", "A.PNG", "b.png")
    files = write(None, dict.fromkeys(names, "text"), suffix=".caption")

    written = sorted(path.name for path in tmp_path.glob("*.caption"))
    assert written == ["A.PNG.caption", "a.caption", "a.png.caption", "b.caption"]
    assert (files.num_other_names, files.other_name) == (2, ("a.png", "a.png.caption"))


def test_an_xmp_keeps_everything_but_its_description(tmp_path: Path) -> None:
    first, second, third = pictures(tmp_path, "a.png", "b.png", "c.png")
    rating = b"""<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
 <rdf:Description rdf:about="" xmlns:xmp="http://ns.adobe.com/xap/1.0/" xmp:Rating="5"/></rdf:RDF></x:xmpmeta>"""
    (tmp_path / "a.png.xmp").write_bytes(rating)
    (tmp_path / "b.png.xmp").write_bytes(b"<not>xmp</not>")
    wanted = dict.fromkeys([first, second, third], "a <star> & \x0b")
    files = write(None, wanted, text_format=XMP, existing="replace")

    changed = (tmp_path / "a.png.xmp").read_bytes()
    assert changed.startswith(rating[: rating.index(b"</rdf:RDF>")])
    assert description_of(changed) == description_of((tmp_path / "c.png.xmp").read_bytes()) == "a <star> & \ufffd"
    assert "it is not XMP" in files.refusals.told[0]
    again = write(None, wanted, text_format=XMP)
    assert (again.num_same, again.num_written) == (2, 0)


def test_a_folder_in_the_place_of_a_text_and_a_name_too_long_cost_no_other_text(tmp_path: Path) -> None:
    first, long, second = pictures(tmp_path, "a.png", "x" * 255, "b.png")
    (tmp_path / "a.txt").mkdir()

    assert write(None, {first: "one", long: "one", second: "two"}, existing="replace").refusals.count == 2
    assert sorted(os.listdir(tmp_path)) == ["a.png", "a.txt", "b.png", "b.txt", "x" * 255]  # and no partial file


def test_many_refusals_are_counted_and_some_told(tmp_path: Path) -> None:
    lines = write(None, {str(tmp_path / f"{number}.png"): "" for number in range(MAX_TOLD + 5)}).refusals.lines()

    assert len(lines) == MAX_TOLD + 1
    assert lines[-1] == "error: and 5 more"


# Only in allowed folders


def beside(below: Sequence[Path], *names: str | Path) -> SidecarFiles:
    return write(None, {str(name): "text" for name in names}, below=below)


def test_beside_pictures_elsewhere_nothing_is_written_and_their_common_folder_is_known(tmp_path: Path) -> None:
    inside, *outside = pictures(tmp_path, "in/a.png", "out/b.png", "out/deep/c.png", "in-too/d.png")
    files = beside([tmp_path / "in"], inside, *outside[:2])

    assert texts(tmp_path) == {"in/a.txt": "text\n"}
    assert (files.num_outside, files.outside) == (2, str(tmp_path / "out"))
    assert "name its folder as --below" in files.refusals.told[0]
    assert beside([tmp_path / "in"], outside[2]).num_outside == 1  # a name that only starts with the same letters


def test_neither_dots_nor_links_lead_out_of_the_folder(tmp_path: Path) -> None:
    pictures(tmp_path, "in/sub/a.png", "out/b.png")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out")
    allowed = tmp_path / "in"
    files = beside([allowed], allowed / "../out/b.png", allowed / "link/b.png", allowed / "sub/../link/b.png")

    assert texts(tmp_path) == {}
    assert files.num_outside == 3


def test_a_link_to_a_picture_has_its_text_beside_it_and_a_link_to_a_folder_is_the_folder(tmp_path: Path) -> None:
    picture, _ = pictures(tmp_path, "out/b.png", "in/c.png")
    (tmp_path / "in" / "a.png").symlink_to(picture)
    (tmp_path / "link").symlink_to("in")

    assert beside([tmp_path / "in"], tmp_path / "in" / "a.png").num_written == 1
    assert beside([tmp_path / "link"], tmp_path / "in" / "c.png").num_written == 1
    assert beside([tmp_path / "in"], tmp_path / "link" / "c.png").num_same == 1
    assert texts(tmp_path) == {"in/a.txt": "text\n", "in/c.txt": "text\n"}
