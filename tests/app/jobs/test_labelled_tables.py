"""Tables of labelled pictures are read, or refused with the line number."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.learning.calibration.calibrate import read_labelled
from llama_adapter.app.pictures.inputs import InputsError

CHOICES = ("Yes", "No")


class Table:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, text: str | bytes, name: str = "labels.csv") -> list[tuple[str, int, str | None]]:
        path = self.folder / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        labelled = read_labelled(str(path), choices=CHOICES)
        return [
            (
                str(Path(one.item.label).relative_to(self.folder)),
                CHOICES.index(one.answers[0]),
                one.question.instruction,
            )
            for one in labelled
        ]


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path)


def test_pictures_are_relative_to_the_table_and_labels_may_be_of_any_case(table: Table) -> None:
    assert table.read("picture,label\na.png,yes\nsub/b.png, NO \n") == [("a.png", 0, None), ("sub/b.png", 1, None)]


def test_a_table_may_have_a_byte_order_mark_other_columns_and_prompts(table: Table) -> None:
    text = '\ufeffwho,Label,Prompt,file_name\r\nme,Yes,"Is it, say, red?",a.png\r\nyou,No,,b.png\r\n'

    assert table.read(text) == [("a.png", 0, "Is it, say, red?"), ("b.png", 1, None)]


def test_the_same_line_again_counts_once(table: Table) -> None:
    assert len(table.read("picture,label\na.png,yes\na.png,Yes\n")) == 1


def test_names_that_are_not_utf8_lead_to_their_files(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_bytes(b"picture,label\n\xff.png,yes\n")

    assert read_labelled(str(tmp_path / "labels.csv"), choices=CHOICES)[0].item.source == str(tmp_path / "\udcff.png")


def test_rows_without_a_label_are_noted(table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(table.read('picture,label\n"a\nb.png",yes\nb.png,\n')) == 1
    assert "note: left out of the data: rows without an answer: 1" in capsys.readouterr().err


REFUSED = {
    "picture,label\na.png,yes\nb.png,maybe\n": "l.csv",
    "picture,label\n,yes\n": "l.csv",
    "picture,label\na.png\n": "l.csv",
    "picture,label\na.png,yes\na.png,no\n": "l.csv",
    "picture,colour\na.png,yes\n": "l.csv",
    'picture,label\n"a.png,yes\n': "l.csv",
    "picture,label\n": "l.csv",
    "": "l.csv",
    '{"picture": "a.png", "label": "yes"}\n[1]\n': "l.jsonl",
    '{"picture": "a.png", "label": 1}': "l.jsonl",
    '{"picture": 7, "label": "yes"}': "l.jsonl",
    '{"picture": "a.png", "label": "yes", "prompt": []}': "l.jsonl",
    "a.png yes": "l.txt",
}


def test_unusable_tables_are_refused_with_the_line(table: Table, snapshot: SnapshotAssertion) -> None:
    said = {}
    for text, name in REFUSED.items():
        with pytest.raises(InputsError) as refused:
            table.read(text, name)
        said[text] = refused.value.message.replace(f"{table.folder}/", "")
    assert said == snapshot


@given(st.binary(max_size=200))
def test_no_bytes_are_more_than_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    for name in ("labels.csv", "labels.jsonl"):
        path = tmp_path_factory.getbasetemp() / name
        path.write_bytes(data)
        try:
            found = read_labelled(str(path), choices=CHOICES)
        except InputsError:
            continue
        assert found
