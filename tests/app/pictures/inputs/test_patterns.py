"""Names with wildcards: they match files lazily, in natural order."""

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llama_adapter.app.pictures.inputs.patterns import expand_pattern, is_pattern
from tests.app.pictures.inputs.files import error_codes, fill, locked, named

PATTERNS = yaml.safe_load(Path(__file__).with_name("patterns.yaml").read_text())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    names = ("pic_10.png", "pic_2.png", "Pic_3.PNG", ".hidden.png", "notes.txt", "part.tar")
    below = ("day_10/a.jpg", "day_2/a.jpg", "day_2/deep/b.jpg", "day_2/c.data", ".cache/d.png")
    return fill(tmp_path, *names, *below)


@pytest.mark.parametrize(("pattern", "expected"), PATTERNS.items())
def test_patterns_match_as_in_shells(folder: Path, pattern: str, expected: list[str]) -> None:
    def filled(text: str) -> str:
        return text.format(name=folder.name, folder=folder)

    assert list(expand_pattern(filled(pattern))) == list(map(filled, expected))


def test_what_matches_is_taken_as_if_it_had_been_named(folder: Path) -> None:
    items = named("day_*")
    assert [item.label for item in items] == ["day_2/a.jpg", "day_10/a.jpg"]
    assert [item.root for item in items] == ["day_2", "day_10"]
    assert [item.root for item in named("*/a.jpg", "day_2/*.jpg")] == [".", ".", "day_2"]


def test_a_file_that_is_called_so_to_the_letter_is_no_pattern(folder: Path) -> None:
    fill(folder, "pic_[2].png", "what?.png")
    assert [item.source for item in named("pic_[2].png", "what?.png")] == ["pic_[2].png", "what?.png"]
    assert is_pattern("pic_[210].png")


def test_a_pattern_without_a_match_is_an_item_that_says_so(folder: Path) -> None:
    items = named("pic_*.gif", "pic_2.png")
    assert error_codes(items) == ["missing", None]
    assert items[0].root is None  # no folder is involved that could have disappeared
    assert "match the pattern `pic_*.gif`" in items[0].error.message


def test_links_to_folders_are_followed_but_not_to_any_depth(folder: Path) -> None:
    (folder / "circle").symlink_to(folder, target_is_directory=True)
    assert list(expand_pattern("**/*_2.png")) == ["pic_2.png"]
    assert list(expand_pattern("circ*/*_2.png")) == ["circle/pic_2.png"]


def test_a_folder_that_cannot_be_listed_is_not_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked(monkeypatch, "day_2")
    assert list(expand_pattern("**/*.jpg")) == ["day_2", "day_10/a.jpg"]


def test_only_folders_that_may_hold_matches_are_listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, listed = os.scandir, []

    def note(path: str) -> object:
        listed.append(path)
        return real(path)

    monkeypatch.setattr(os, "scandir", note)
    assert next(expand_pattern("day_2/d*/*.jpg")) == "day_2/deep/b.jpg"
    assert listed == ["day_2", "day_2/deep"]


@given(st.text("*?[]!^-.a/\n", min_size=1).filter(lambda text: text.strip("/")))
def test_every_text_is_a_pattern_or_a_name(text: str) -> None:
    if is_pattern(text) and not text.startswith("/") and ".." not in text:
        assert all(os.path.lexists(path) for path in expand_pattern(f"tests/app/pictures/inputs/{text}"))
