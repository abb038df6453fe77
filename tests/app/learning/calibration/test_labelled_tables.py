"""Tables of labelled pictures for `--calibrate` are read, or refused with the line number."""

from pathlib import Path

import pytest

from llama_adapter.app.learning.calibration.calibrate import read_labelled
from llama_adapter.app.pictures.inputs import InputsError

CHOICES = ("Yes", "No")


def read(folder: Path, text: bytes, name: str = "labels.csv") -> list[tuple[str, str, str | None]]:
    """The picture, answer and prompt of each row of a table."""
    (folder / name).write_bytes(text)
    return [
        (str(Path(one.item.label).relative_to(folder)), one.answers[0], one.question.instruction)
        for one in read_labelled(str(folder / name), choices=CHOICES)
    ]


def test_pictures_are_relative_to_the_table_and_rows_without_a_label_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = b'who,Label,Prompt,file_name\r\nme,yes,"Is it, say, red?",\xff.png\r\nyou, NO ,,sub/b.png\r\nyou,,,c.png\r\n'

    assert read(tmp_path, text) == [("\udcff.png", "Yes", "Is it, say, red?"), ("sub/b.png", "No", None)]
    assert "note: left out of the data: rows without an answer: 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("picture,label\na.png,yes\nb.png,maybe\n", "l.csv, line 3: its label 'maybe' is none of Yes, No"),
        ("picture,label\n", "Wanted labelled data, got none"),
        ("question,label\nRed?,yes\n", "l.csv, line 2: it has no picture in a column picture"),
        ("picture,colour\na.png,yes\n", "one of the columns answer"),
    ],
)
def test_unusable_tables_are_refused_with_the_line(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(InputsError) as refused:
        read(tmp_path, text.encode(), "l.csv")
    assert told in "\n".join([refused.value.message, *refused.value.details])
