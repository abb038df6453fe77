"""Known data sets are recognised by their layout on disk; these tests make small files in the same form."""

import json
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.pictures.inputs import InputsError
from llama_adapter.app.pictures.inputs.lines import Unmarked
from tests.app.learning.labelled.tables import brief, read, reasons, write_lines
from tests.app.pictures.inputs.files import fill


def write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))


def pope(folder: Path, *, pictures: str = "val2014") -> Path:
    for kind, label in (("random", "yes"), ("adversarial", "no")):
        entry = {"question_id": 1, "image": "COCO_val2014_000000000001.jpg", "text": "Is there a dog?", "label": label}
        write_lines(folder / "coco" / f"coco_pope_{kind}.json", entry)
    fill(folder, f"{pictures}/COCO_val2014_000000000001.jpg")
    return folder


@pytest.mark.parametrize("pictures", ["val2014", "coco/val2014", "images", "."])
def test_pope(tmp_path: Path, pictures: str) -> None:
    found = read(pope(tmp_path, pictures=pictures))

    assert [(one.part, one.answers, one.choices, one.split) for one in found.examples] == [
        ("adversarial", ("no",), ("yes", "no"), ""),
        ("random", ("yes",), ("yes", "no"), ""),
    ]
    assert brief(found.examples[0], folder=tmp_path)[1:3] == ("Is there a dog?", "choice")
    assert not found.problems


def test_pictures_may_lie_elsewhere(tmp_path: Path) -> None:
    pope(tmp_path / "set", pictures="../elsewhere")

    assert len(reasons(read(tmp_path / "set"), folder=tmp_path)) == 1  # the missing picture, once
    assert not read(tmp_path / "set", picture_folder=str(tmp_path / "elsewhere")).problems


def test_a_file_of_a_set_is_data_too_and_its_name_gives_the_part(tmp_path: Path) -> None:
    found = read(pope(tmp_path) / "coco" / "coco_pope_random.json")

    assert [one.part for one in found.examples] == ["random"]
    (tmp_path / "coco" / "coco_pope_random.json").rename(tmp_path / "coco" / "gqa_pope_random.json")

    assert [one.part for one in read(tmp_path).examples] == ["adversarial", "gqa random"]


@pytest.mark.parametrize("has_folders", [True, False])
def test_mme(tmp_path: Path, has_folders: bool) -> None:
    for category in ("existence", "OCR"):
        place = tmp_path / category
        fill(place, "images/1.jpg" if has_folders else "1.jpg")
        text = place / ("questions_answers_YN/1.txt" if has_folders else "1.txt")
        text.parent.mkdir(exist_ok=True)
        text.write_text("Is it red? Please answer yes or no.\tYes\nIs it blue? Please answer yes or no.\tNo\n")
    found = read(tmp_path)

    assert [(one.part, one.answers, one.choices, one.line) for one in found.examples] == [
        (part, (answer,), ("Yes", "No"), line)
        for part in ("existence", "OCR")
        for answer, line in (("Yes", 1), ("No", 2))
    ]
    assert found.examples[1].question.instruction == "Is it blue? Please answer yes or no."
    assert not found.problems


def vqa(folder: Path, *, annotations: str = "", version: str = "v2_") -> Path:
    questions = [{"image_id": 7, "question": "How many?", "question_id": 70}]
    answers = [{"answer": answer, "answer_confidence": "yes", "answer_id": 1} for answer in ("3", "3", "2", "2", "two")]
    annotation = {"question_id": 70, "answer_type": "number", "multiple_choice_answer": "2", "answers": answers}
    write(folder / f"{version}OpenEnded_mscoco_val2014_questions.json", {"questions": questions})
    write(folder / annotations / f"{version}mscoco_val2014_annotations.json", {"annotations": [annotation]})
    fill(folder, "val2014/COCO_val2014_000000000007.jpg")
    return folder


@pytest.mark.parametrize(("annotations", "version"), [("", "v2_"), ("../Annotations", "v2_"), ("", "")])  # "": OK-VQA
def test_vqa(tmp_path: Path, annotations: str, version: str) -> None:
    found = read(vqa(tmp_path / "Questions", annotations=annotations, version=version))

    (example,) = found.examples
    assert brief(example, folder=tmp_path / "Questions") == (
        "val2014/COCO_val2014_000000000007.jpg",
        "How many?",
        "answer",
        ("2", "2", "3", "3", "two"),  # the most frequent answer first, of two that of the set, and all answers kept
    )
    assert (example.part, example.split) == ("number", "validation")


def coco(folder: Path) -> Path:
    images = [{"id": number, "file_name": f"{number:012d}.jpg"} for number in (1, 2)]
    annotations = [{"image_id": 1, "id": number, "caption": f"Caption {number}."} for number in range(5)]
    write(folder / "annotations" / "captions_val2017.json", {"images": images, "annotations": annotations})
    fill(folder, "val2017/000000000001.jpg", "val2017/000000000002.jpg")
    return folder


def test_captions_of_coco(tmp_path: Path) -> None:
    found = read(coco(tmp_path))

    (example,) = found.examples
    captions = tuple(f"Caption {number}." for number in range(5))
    assert brief(example, folder=tmp_path) == ("val2017/000000000001.jpg", None, "caption", captions)
    assert example.split == "validation"
    assert "picture 2: it has no answer" in reasons(found, folder=tmp_path)[0]


def test_science_qa(tmp_path: Path) -> None:
    asked = {"question": "Which is a fish?", "choices": ["shark", "whale"], "answer": 0}
    problem = {**asked, "hint": "", "subject": "natural science"}
    problems = {
        "1": {**problem, "image": "image.png", "split": "train"},
        "2": {**problem, "image": None, "hint": "Look.", "split": "test"},
        "3": {**problem, "image": None, "answer": 2},
    }
    write(tmp_path / "problems.json", problems)
    fill(tmp_path, "images/train/1/image.png")
    found = read(tmp_path)

    one, two = found.examples
    assert brief(one, folder=tmp_path) == ("images/train/1/image.png", "Which is a fish?", "choice", ("shark",))
    assert (one.choices, one.part, one.split) == (("shark", "whale"), "natural science", "train")
    assert (two.item.source, two.question.input, two.split) == (None, "Look.", "test")
    assert reasons(found, folder=tmp_path)[0].startswith("problems.json, problem 3: it has no answer")


@pytest.mark.parametrize("data", [[], {}, {"questions": 1}, {"questions": [1]}])
def test_damaged_files_are_refused(tmp_path: Path, data: Any) -> None:
    write(vqa(tmp_path) / "v2_OpenEnded_mscoco_val2014_questions.json", data)
    with pytest.raises(InputsError, match="with a list `questions`"):
        read(tmp_path)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_files_of_sets_are_read_as_a_whole(tmp_path: Path, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pope(tmp_path) / "coco" / "coco_pope_random.json"
    line = json.loads(path.read_text())
    asked = [f"Is there a caf\u00e9 {number}?" for number in range(1_000)]
    path.write_text("\n".join(json.dumps({**line, "text": one}) for one in asked), encoding=encoding)
    assert path.stat().st_size > 2**16
    assert [one.question.instruction for one in read(path).examples] == asked

    def read1(file: Unmarked, size: int = 0) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Unmarked, "read1", read1)
    with pytest.raises(InputsError, match="Input/output error"):
        read(path)


def test_two_sets_and_questions_without_annotations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputsError, match="OK-VQA or VQA v1 and VQAv2"):
        read(vqa(vqa(tmp_path / "several" / "sets"), version=""))
    folder = vqa(coco(tmp_path / "sets"))  # folders beside it are searched too
    with pytest.raises(InputsError, match="VQAv2 and captions of COCO"):
        read(folder)
    (folder / "v2_mscoco_val2014_annotations.json").unlink()
    with pytest.raises(InputsError, match="v2_mscoco_val2014_annotations"):
        read(folder / "v2_OpenEnded_mscoco_val2014_questions.json")


def test_questions_of_vqa_without_answers_do_not_count(tmp_path: Path) -> None:
    write(vqa(tmp_path) / "v2_OpenEnded_mscoco_test2015_questions.json", {"questions": []})

    assert len(read(tmp_path).examples) == 1
