"""The table of labels: rows are stored at once, and a later run goes on. The most useful pictures come first."""

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from llama_adapter.app.learning.evaluating.outcomes import question_of
from llama_adapter.app.learning.labelled import label_table as module
from llama_adapter.app.learning.labelled.label_table import (
    LabelTable,
    LabelTableChangedError,
    picture_cell,
    picture_path,
)
from llama_adapter.app.learning.labelled.order import next_to_label
from llama_adapter.app.learning.labelled.reading import read_examples
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.locking import OutputLockedError

HEAD = "picture,label\n"


def labels(table: LabelTable) -> list[tuple[str, str]]:
    return [(row.picture, row.label) for row in table.rows]


def test_rows_are_stored_at_once_and_a_second_run_goes_on_and_removes_the_last(tmp_path: Path) -> None:
    path = tmp_path / "new" / "labels.csv"
    LabelTable(path).close()
    assert not path.exists(), "a run without labels leaves no file"
    first = LabelTable(path)
    first.add("a.png", "cat")
    first.add('b "2", é.png', "a, b")
    assert path.read_text() == HEAD + 'a.png,cat\n"b ""2"", é.png","a, b"\n'
    with pytest.raises(OutputLockedError):
        LabelTable(path)
    first.close()

    second = LabelTable(path)
    assert labels(second) == [("a.png", "cat"), ('b "2", é.png', "a, b")]
    assert second.remove_last().label == "a, b"
    second.add("c.png", "catfish")
    second.remove_last()
    second.remove_last()
    assert path.read_text() == HEAD
    with pytest.raises(IndexError):
        second.remove_last()
    second.close()


@pytest.mark.parametrize(
    ("content", "rows", "without_last"),
    [
        ("", [], HEAD),
        ("picture,label", [], HEAD),
        (HEAD + "a.png,horse", ["a.png"], HEAD),
        (HEAD + '"a\nb.png", "cat"\n\nb.png,cat\n', ["a\nb.png", "b.png"], HEAD + '"a\nb.png", "cat"\n\n'),  # by hand
        ("\ufeffPicture, Label\r\na.png , cat\r\n\r\n", ["a.png"], "\ufeffPicture, Label\r\n"),  # of a spreadsheet
    ],
)
def test_tables_of_other_programs_are_read_and_keep_their_form(
    tmp_path: Path, content: str, rows: list[str], without_last: str
) -> None:
    path = tmp_path / "labels.csv"
    path.write_bytes(content.encode())
    with closing(LabelTable(path)) as table:
        assert [row.picture for row in table.rows] == rows
        assert path.read_bytes().decode() == content
        table.add("z.png", "cat")
    with closing(LabelTable(path)) as again:
        assert labels(again)[-1] == ("z.png", "cat")
        for _ in again.rows[-2:]:
            again.remove_last()
        assert path.read_bytes().decode() == without_last


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("labels.csv", b"name,size\n", "columns picture,label"),
        ("labels.csv", b"picture;label\n", "columns picture,label"),
        ("labels.csv", b"GIF89a\xff\0", "not CSV in UTF-8"),
        ("labels.csv", b"\0\0\0\0", "columns picture,label"),
        ("labels.csv", HEAD.encode() + b"a.png,cat,3\n", "2 cells"),
        ("labels.csv", HEAD.encode() + b"\xe9.png,cat\n", "not CSV in UTF-8"),
        ("labels.csv", HEAD.encode() + b'a.png,"cat\nb.png,cat\n', "not CSV in UTF-8: unexpected end"),
        ("photo.png", b"", r"called \.csv"),
    ],
)
def test_other_files_are_refused_and_unchanged(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        LabelTable(path)
    assert path.read_bytes() == content


def test_a_table_that_another_program_changes_is_not_written(tmp_path: Path) -> None:
    path, moved = tmp_path / "labels.csv", tmp_path / "moved.csv"
    table = LabelTable(path)
    table.add("a.png", "cat")
    os.rename(path, moved)
    with pytest.raises(LabelTableChangedError):
        table.add("b.png", "cat")
    os.rename(moved, path)
    with path.open("a") as file:
        file.write("b.png,cat\n")
    with pytest.raises(LabelTableChangedError):
        table.remove_last()
    table.close()
    assert path.read_text() == HEAD + "a.png,cat\nb.png,cat\n"


def test_a_table_keeps_its_mode_and_its_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, link, synced = tmp_path / "tables", tmp_path / "labels.csv", list[Path]()
    folder.mkdir()
    (folder / "labels.csv").write_text(HEAD)
    (folder / "labels.csv").chmod(0o640)
    link.symlink_to(folder / "labels.csv")
    monkeypatch.setattr(module, "sync_folder", synced.append)
    with closing(LabelTable(link)) as table:
        table.add("a.png", "cat")
    assert (folder / "labels.csv").read_text() == HEAD + "a.png,cat\n"
    assert ((folder / "labels.csv").stat().st_mode & 0o777, link.is_symlink()) == (0o640, True)
    assert synced == [folder]


def test_a_read_only_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "labels.csv"
    path.write_text(HEAD)
    monkeypatch.setattr(os, "access", lambda place, mode: (place, mode) != (path, os.W_OK))  # root may write to all
    with pytest.raises(PermissionError, match=r"labels\.csv"):
        LabelTable(path)


def test_train_and_eval_read_the_table(tmp_path: Path) -> None:
    samples = sorted(sample_pictures().glob("*.png"))[:2]
    (tmp_path / "in, side.png").write_bytes(samples[0].read_bytes())
    table = LabelTable(tmp_path / "labels.csv", question="Which {animal}, please?")
    for picture, label in ((tmp_path / "in, side.png", "cat"), (samples[1], "a, b")):
        table.add(picture_cell(str(picture), folder=tmp_path), label)
    table.close()

    found = read_examples(str(table.path))
    assert [(one.answers, one.choices, one.task) for one in found.examples] == [
        (("cat",), ("a, b", "cat"), "choice"),
        (("a, b",), ("a, b", "cat"), "choice"),
    ]
    assert {question_of(one, question=None).instruction for one in found.examples} == {"Which {animal}, please?"}
    assert [one.item.source for one in found.examples] == [str(tmp_path / "in, side.png"), str(samples[1].absolute())]


def test_a_picture_has_one_name_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("photos")
    assert picture_cell("photos/../photos/a.png", folder="") == "photos/a.png"
    assert picture_cell("shard.tar/a.png", folder="tables") == str(tmp_path / "shard.tar" / "a.png")
    assert picture_path("link/a.png", folder="") == picture_path(str(tmp_path / "photos/a.png"), folder="x")
    for name in (" a.png", "a\n.png", "\udcff.png"):
        with pytest.raises(ValueError, match="rename it"):
            picture_cell(name, folder=tmp_path)


LINE = np.array([[0, 0], [1, 0], [5, 0], [9, 0], [10, 0]], np.float32)


def sure(*likeliest: float) -> np.ndarray:
    """Probabilities of three choices; the second has the rest."""
    return np.array([[one, 1 - one, 0] for one in likeliest], np.float32)


@pytest.mark.parametrize(
    ("probabilities", "known", "expected"),
    [
        (sure(0.9, 0.6, 0.8, 0.7, 0.95), [], 1),  # the least certain
        (sure(0.5, 0.6, 0.9, 0.9, 0.9), [(0, 0)], 1),  # of two uncertain ones; farther ones are certain
        (sure(0.6, 0.9, 0.9, 0.9, 0.5), [(1, 0)], 4),
        (sure(0.6, 0.9, 0.9, 0.9, 0.5), [(0, 3), (9, 0)], 0),  # the nearest known one counts
        (sure(0.6, 0.9, 0.9, 0.9, 0.5), [(5, 0)], 4),  # at the same distance, the less certain one
    ],
)
@pytest.mark.parametrize("offset", [0.0, 1e4])  # beside which distances are small
def test_the_next_picture_is_uncertain_and_different(
    probabilities: np.ndarray, known: list[tuple[int, int]], expected: int, offset: float
) -> None:
    others = np.array(known, np.float32).reshape(-1, 2) + np.float32(offset)
    assert next_to_label(probabilities, LINE + np.float32(offset), others) == expected
