"""Data sets that are recognised by their layout on disk, and the data of LLaMA-Adapter's own training.

The latter are a YAML with META, image-text lists, and LLaVA's and Alpaca's JSON.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.learning.labelled.reading import read_examples
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
    for text in tmp_path.rglob("*.txt"):
        text.write_text("a red car\n")
    if not has_folders:
        assert {one.task for one in read(tmp_path).examples} == {"caption"}, "texts beside pictures are no set"


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


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[index % 2], "value": text} for index, text in enumerate(texts)]


def chat(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[index % 2], "content": one} for index, one in enumerate(contents)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fill(tmp_path, "a.jpg", "b.jpg")
    (tmp_path / "cc3m.csv").write_text('url\t\tcaption\na.jpg\t\tA star, red.\nb.jpg\t\tA "big" circle.\n')
    (tmp_path / "list.tsv").write_text(f"url\tcaption\n{tmp_path}/a.jpg\tA star, red.\n")
    llava = [
        {"id": "1", "image": "a.jpg", "conversations": turns("<image>\nWhat is it?", "A star.", "And how?", "Red.")},
        {"id": "2", "image": "b.jpg", "conversations": turns("Where is it?\n<image>", "Left.")},
    ]
    (tmp_path / "llava.json").write_text(json.dumps(llava))
    parts = [{"type": "image"}, {"type": "text", "text": "Where is it?", "index": None}]
    chats = [
        {
            "messages": [
                {"role": "system", "content": "Look."},
                *chat("<image>What is it?", "A star.", "And how?", "Red."),
            ]
        },
        {"messages": [{"role": "developer", "content": "x"}, *chat(parts, [{"type": "text", "text": "Left."}])]},
    ]
    lines = (json.dumps({**row, "images": [name]}) + "\n" for row, name in zip(chats, ("a.jpg", "b.jpg"), strict=True))
    (tmp_path / "chat.jsonl").write_text("".join(lines))
    (tmp_path / "alpaca.json").write_text(json.dumps([{"instruction": "Add.", "input": "1, 2", "output": "3"}]))
    return tmp_path


CAPTIONS = [("a.jpg", None, "caption", ("A star, red.",)), ("b.jpg", None, "caption", ('A "big" circle.',))]
ASKED = [
    ("a.jpg", "What is it?", "answer", ("A star.",)),
    ("a.jpg", "And how?", "answer", ("Red.",)),
    ("b.jpg", "Where is it?", "answer", ("Left.",)),
]
TEXTS = [(None, "Add.", "answer", ("3",))]


@pytest.mark.parametrize("place", ["", "{folder}/"], ids=["beside the config", "absolute"])
def test_a_config_lists_tables_that_are_read_as_they_are(place: str, folder: Path) -> None:
    names = ["cc3m.csv", "list.tsv", "llava.json", "chat.jsonl", "alpaca.json"]
    (folder / "data.yaml").write_text("META:\n" + "".join(f"  - '{place.format(folder=folder)}{n}'\n" for n in names))
    found = read(folder / "data.yaml")
    expected = CAPTIONS + CAPTIONS[:1] + ASKED + ASKED + TEXTS
    assert [brief(one, folder=folder) for one in found.examples] == expected
    assert not found.problems


def test_a_config_lists_tables_of_the_present_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "configs").mkdir()
    (folder / "configs" / "data.yaml").write_text("META: [alpaca.txt]\n")
    (folder / "alpaca.json").rename(folder / "alpaca.txt")
    monkeypatch.chdir(folder)
    assert len(read(Path("configs/data.yaml")).examples) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("META: []", "Wanted a list of tables under `META`"),
        ("META: a.json", "Wanted a list of tables under `META`"),
        ("tables: [a.json]", "Wanted a list of tables under `META`"),
        ("META: [missing.json]", "`missing.json` does not exist"),
        ("META: [data.yaml]", "Wanted tables under `META`"),
        ("- a.json", "wanted sections"),
        ("META: [a.json", "data.yaml"),
    ],
)
def test_another_config_is_refused(text: str, told: str, folder: Path) -> None:
    (folder / "data.yaml").write_text(text)
    with pytest.raises(InputsError, match=told):
        read(folder / "data.yaml")


def test_braces_and_names_of_elements_of_html_are_text_and_an_own_column_stays_a_column(folder: Path) -> None:
    own = {"image": "b.jpg", "question": "What is it?", "answer": "y", "conversations": 3}
    first = turns("<image>\nWhat does {x} mean?", "x")
    html = turns("What is <video> in HTML?", "A tag.")
    rows = [{"image": "a.jpg", "conversations": first}, {"conversations": html}, own]
    (folder / "llava.json").write_text(json.dumps(rows))
    found = read(folder / "llava.json").examples
    asked = [(one.question.instruction, one.answers) for one in found]
    assert asked == [
        ("What does {{x}} mean?", ("x",)),
        ("What is <video> in HTML?", ("A tag.",)),
        ("What is it?", ("y",)),
    ]


NO_TURNS = "its `conversations` are no list of turns"
NO_PICTURE = "its `conversations` have {}, and it has no picture"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"image": "a.jpg", "conversations": []}, NO_TURNS),
        ({"image": "a.jpg", "conversations": "text"}, NO_TURNS),
        ({"image": "a.jpg", "conversations": turns("a", "b")[::-1]}, NO_TURNS),
        ({"image": "a.jpg", "conversations": [{"from": "human", "value": 1}, *turns("a", "b")[1:]]}, NO_TURNS),
        ({"image": "a.jpg", "messages": chat("What?", [{"type": "image"}])}, NO_TURNS),
        ({"image": "a.jpg", "messages": chat([{"type": "input_audio"}], "A star.")}, NO_TURNS),
        ({"conversations": turns("<image>\nWhat?", "A star.")}, NO_PICTURE.format("<image>")),
        ({"conversations": turns("<video>\nWhat?", "A star.")}, NO_PICTURE.format("<video>")),
        ({"conversations": turns("Picture 1: <img>a.jpg</img>\nWhat?", "A star.")}, NO_PICTURE.format("</img>")),
        ({"images": ["a.jpg", "b.jpg"], "conversations": turns("What?", "A star.")}, "`images` has 2 pictures"),
    ],
)
def test_other_conversations_and_those_without_their_picture_are_refused_with_their_line(
    row: dict[str, Any], reason: str, folder: Path
) -> None:
    (folder / "llava.json").write_text(json.dumps([row]))
    (told,) = reasons(read(folder / "llava.json"), folder=folder)
    assert told.startswith(f"llava.json, line 1: {reason}")


def test_a_url_beside_a_question_is_a_column(folder: Path) -> None:
    (folder / "list.tsv").write_text("url\tquestion\tanswer\nhttp://example.com\tWhat?\tA star.\n")
    (example,) = read(folder / "list.tsv").examples
    assert (example.item.source, example.item.columns) == (None, {"url": "http://example.com"})


def test_conversations_with_one_picture_and_question_may_answer_differently_and_are_counted(folder: Path) -> None:
    for name in ("a.jpg", "copy.jpg"):
        (folder / name).write_bytes(b"same")
    rows = [
        {"image": name, "conversations": turns("<image>\nDescribe it.", said)}
        for name, said in [("a.jpg", "A star."), ("a.jpg", "Red."), ("a.jpg", "Red."), ("copy.jpg", "A big star.")]
    ]
    (folder / "llava.json").write_text(json.dumps(rows))
    found = read_examples(str(folder / "llava.json"))

    assert [one.answers for one in found.examples] == [("A star.",), ("Red.",), ("A big star.",)]
    (note,) = found.problems
    assert note.is_warning
    assert str(note) == (
        "the conversations of the data: 2 have another answer than an earlier one with the same picture and question; "
        "all are used"
    )
