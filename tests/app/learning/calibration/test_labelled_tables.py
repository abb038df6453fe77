"""Labelled pictures for `--calibrate`: faults are those of all labelled data, and a row without a picture is one."""

from pathlib import Path

import pytest

from llama_adapter.app.learning.calibration.calibrate import read_labelled
from llama_adapter.app.pictures.inputs import InputsError


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("picture,label\na.png,yes\nb.png,maybe\n", "l.csv, line 3: its label 'maybe' is none of Yes, No"),
        ("picture,label\n", "l.csv`, got none"),
        ("question,label\nRed?,yes\n", "l.csv, line 2: it has no picture in a column picture"),
        ("picture,colour\na.png,yes\n", "one of the columns answer"),
        ("picture,label\na.png,yes\nb.png,\n", None),
    ],
)
def test_faults_are_refused_or_noted(
    rows: str, told: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "l.csv").write_text(rows)
    if told is None:
        assert [one.answers for one in read_labelled(str(tmp_path / "l.csv"), choices=("Yes", "No"))] == [("Yes",)]
        assert "note: left out of the data: rows without an answer: 1" in capsys.readouterr().err
        return
    with pytest.raises(InputsError) as refused:
        read_labelled(str(tmp_path / "l.csv"), choices=("Yes", "No"))
    assert told in "\n".join([refused.value.message, *refused.value.details])
