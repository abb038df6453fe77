"""The data of LLaMA-Adapter's own training: a YAML with META, image-text lists, and LLaVA's and Alpaca's JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.learning.labelled.reading import read_examples
from llama_adapter.app.pictures.inputs import InputsError
from tests.app.learning.labelled.tables import brief, read, reasons
from tests.app.pictures.inputs.files import fill


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


def test_braces_in_firstare_text_and_an_own_column_stays_a_variable(folder: Path) -> None:
    own = {"image": "b.jpg", "question": "What is it?", "answer": "y"}
    first = turns("<image>\nWhat does {x} mean?", "x")
    rows = [{"image": "a.jpg", "conversations": first}, {**own, "conversations": 3}]
    (folder / "llava.json").write_text(json.dumps(rows))
    found = read(folder / "llava.json").examples
    asked = [(one.question.instruction, one.answers) for one in found]
    assert asked == [("What does {{x}} mean?", ("x",)), ("What is it?", ("y",))]


NO_TURNS = "its `conversations` are no list of turns"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"image": "a.jpg", "conversations": []}, NO_TURNS),
        ({"image": "a.jpg", "conversations": "text"}, NO_TURNS),
        ({"image": "a.jpg", "conversations": turns("a", "b")[::-1]}, NO_TURNS),
        ({"image": "a.jpg", "conversations": [{"from": "human", "value": 1}, *turns("a", "b")[1:]]}, NO_TURNS),
        ({"image": "a.jpg", "messages": chat("What?", [{"type": "image"}])}, NO_TURNS),
        ({"image": "a.jpg", "messages": chat([{"type": "input_audio"}], "A star.")}, NO_TURNS),
        (
            {"conversations": turns("<image>\nWhat?", "A star.")},
            "its `conversations` have <image>, and it has no picture",
        ),
        (
            {"conversations": turns("<video>\nWhat?", "A star.")},
            "its `conversations` have <video>, and it has no picture",
        ),
        (
            {"conversations": turns("Picture 1: <img>a.jpg</img>\nWhat?", "A star.")},
            "its `conversations` have </img>, and it has no picture",
        ),
        ({"images": ["a.jpg", "b.jpg"], "conversations": turns("What?", "A star.")}, "`images` has 2 pictures"),
    ],
)
def test_other_conversations_and_those_without_their_picture_are_refused_with_their_line(
    row: dict[str, Any], reason: str, folder: Path
) -> None:
    (folder / "llava.json").write_text(json.dumps([row]))
    (told,) = reasons(read(folder / "llava.json"), folder=folder)
    assert told.startswith(f"llava.json, line 1: {reason}")


def test_a_name_of_an_element_of_html_is_a_word(folder: Path) -> None:
    (folder / "llava.json").write_text(json.dumps([{"conversations": turns("What is <video> in HTML?", "A tag.")}]))
    (found,) = read(folder / "llava.json").examples
    assert found.question.instruction == "What is <video> in HTML?"


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
