"""The tables of a run's parts give the run's examples again, from any folder and for every form of data."""

import json
from pathlib import Path

import pytest

from llama_adapter.app.learning.evaluating.outcomes import question_of
from llama_adapter.app.learning.labelled.example import Example
from llama_adapter.app.learning.labelled.reading import read_examples
from llama_adapter.app.learning.training.job import TrainJob
from llama_adapter.app.learning.training.part_tables import table_rows
from llama_adapter.app.learning.training.prepare import read_data
from llama_adapter.app.pictures.inputs import InputsError
from tests.app.learning.labelled.tables import reasons, write_lines
from tests.app.pictures.inputs.files import tar_bytes


def shown(example: Example) -> tuple[object, ...]:
    """What the model sees of an example, its right answer, and the rest of its row."""
    asked = question_of(example, question="What is it?").shown("Describe it.")
    return (
        *(example.digest, asked, example.task, example.answers, example.choices, example.part),
        dict(example.item.columns),
    )


def write_data(folder: Path) -> list[str]:
    """Write data in every form; returns their names, relative to the folder."""
    for name in ("photos/{a}, b/1.png", "photos/{a}, b/zwölf \udcff.png", "photos/dog/2.png", "val2014/1.jpg", "p.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode(errors="surrogateescape"))
    write_lines(folder / "coco_pope_random.json", {"image": "1.jpg", "text": "Is it red?", "label": "no"})
    rows = [
        {"picture": "p.png", "question": "Is {stem} of {hue} {{x}}?", "hue": "{red}", "answer": "yes", "part": "one"},
        {"picture": "p.png", "question": "Why?", "input": '{"a": 1}', "answers": ["a b", "c"], "split": "test"},
        {"picture": "p.png", "caption": "A star."},
        {"picture": "p.png", "caption": "It shines."},
        {"question": "Is {this} a brace?", "answer": "yes", "choices": ["yes", "no", "n, o"]},
    ]
    write_lines(folder / "rows.jsonl", *rows)
    members = {
        "x/1.png": b"1",
        "x/1.json": b'{"question": "Hue?", "answer": "red"}',
        "2.png": b"2",
        "2.txt": b"A star.",
    }
    for name, mode in (("plain.tar", "w"), ("small.tar.gz", "w:gz")):
        (folder / name).write_bytes(tar_bytes({mode + key: value for key, value in members.items()}, mode=mode))
    return ["photos", "coco_pope_random.json", "rows.jsonl", "plain.tar", "small.tar.gz"]


@pytest.mark.proves("train: tables of parts", "CPU")
def test_a_table_is_read_as_the_examples_it_was_written_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    names = write_data(tmp_path / "data")
    monkeypatch.chdir(tmp_path / "data")
    found = read_data(TrainJob(data=tuple(names), out="a.pth"))
    found.require_sound()
    assert len(found.examples) == 12
    table = write_lines(tmp_path / "elsewhere" / "test.jsonl", *table_rows(found.examples, part="test"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "data").rename(tmp_path / "moved")
    (tmp_path / "data").symlink_to(tmp_path / "moved")
    again = read_examples("test.jsonl")

    again.require_sound()
    assert [shown(one) for one in again.examples] == [shown(one) for one in found.examples]
    assert {one.split for one in again.examples} == {"test"}
    second = [json.dumps(row) for row in table_rows(again.examples, part="test")]
    first = table.read_text().replace("/data/", "/moved/")
    assert "\n".join(second) + "\n" == first, "a table of a table is the same"


def test_many_classes_are_listed_only_where_they_do_not_follow_from_the_labels(tmp_path: Path) -> None:
    for number in range(11):
        (tmp_path / "photos" / f"class {number}").mkdir(parents=True)
        (tmp_path / "photos" / f"class {number}" / "1.png").write_bytes(bytes([number]))
    found = read_data(TrainJob(data=(str(tmp_path / "photos"),), out="a.pth"))
    for examples, has_choices in ((found.examples, False), (found.examples[1:], True)):
        table = write_lines(tmp_path / "test.jsonl", *table_rows(examples, part="test"))
        assert ("choices" in table.read_text()) == has_choices
        assert [shown(one) for one in read_examples(str(table)).examples] == [shown(one) for one in examples]


def test_pictures_in_archives_that_a_table_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.tar.gz").write_bytes(tar_bytes({"1.png": b"1", "2.png": b"22"}, mode="w:gz"))
    (tmp_path / "cut.tar").write_bytes(tar_bytes({"1.png": b"1"})[:700])
    names = ("a.tar.gz/1.png", "a.tar.gz/3.png", "cut.tar/1.png")
    table = write_lines(tmp_path / "table.jsonl", *({"picture": name, "caption": "A star."} for name in names))
    found = read_examples(str(table))
    said = reasons(found, folder=tmp_path)

    assert [one.item.source for one in found.examples][:1] == [b"1"]
    assert any(text.startswith("table.jsonl, line 2: its picture a.tar.gz/3.png does not exist") for text in said)
    assert any("cut.tar" in text and "damaged" in text for text in said)
    monkeypatch.setattr("llama_adapter.app.learning.labelled.pictures.MAX_COMPRESSED_BYTES", 0)
    with pytest.raises(InputsError, match="which has more"):
        read_examples(str(table))
