"""Tables of labelled pictures are read, or refused with the line number."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.learning.calibration.calibrate import read_labelled
from llama_adapter.app.pictures.inputs import InputsError

CHOICES = ("Yes", "No")


def read(folder: Path, text: str, name: str = "labels.csv") -> list[tuple[str, str, str | None]]:
    """The picture, answer and prompt of each row of a table."""
    (folder / name).write_text(text, encoding="utf-8", newline="")
    return [
        (str(Path(one.item.label).relative_to(folder)), one.answers[0], one.question.instruction)
        for one in read_labelled(str(folder / name), choices=CHOICES)
    ]


@pytest.mark.parametrize(
    ("text", "labelled"),
    [
        ("picture,label\na.png,yes\nsub/b.png, NO \n", [("a.png", "Yes", None), ("sub/b.png", "No", None)]),
        (
            '\ufeffwho,Label,Prompt,file_name\r\nme,Yes,"Is it, say, red?",a.png\r\nyou,No,,b.png\r\n',
            [("a.png", "Yes", "Is it, say, red?"), ("b.png", "No", None)],
        ),
        ("picture,label\na.png,yes\na.png,Yes\n", [("a.png", "Yes", None)]),  # the same line again counts once
    ],
    ids=["labels of any case", "byte order mark, other columns and prompts", "repeated"],
)
def test_pictures_are_relative_to_the_table(
    text: str, labelled: list[tuple[str, str, str | None]], tmp_path: Path
) -> None:
    assert read(tmp_path, text) == labelled


def test_names_that_are_not_utf8_lead_to_their_files(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_bytes(b"picture,label\n\xff.png,yes\n")

    assert read_labelled(str(tmp_path / "labels.csv"), choices=CHOICES)[0].item.source == str(tmp_path / "\udcff.png")


def test_rows_without_a_label_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(read(tmp_path, 'picture,label\n"a\nb.png",yes\nb.png,\n')) == 1
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


def test_unusable_tables_are_refused_with_the_line(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    said = {}
    for text, name in REFUSED.items():
        with pytest.raises(InputsError) as refused:
            read(tmp_path, text, name)
        said[text] = refused.value.message.replace(f"{tmp_path}/", "")
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
