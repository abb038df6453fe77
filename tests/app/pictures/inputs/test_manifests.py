"""Manifests: one picture per line, with its question and columns."""

import csv
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.pictures.inputs import (
    InputsError,
    InputSpec,
    PictureInput,
    QuestionFields,
    check_inputs,
    read_inputs,
)
from llama_adapter.app.pictures.inputs.lines import MAX_LINE_BYTES
from tests.app.pictures.inputs.files import error_codes, message


def manifest(folder: Path, content: str | bytes, *, name: str = "m.jsonl") -> list[PictureInput]:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    spec = InputSpec(manifests=(str(path),))
    check_inputs(spec)
    return list(read_inputs(spec))


@pytest.mark.parametrize("column", ["picture", "image", "file_name", "filename", "path"])
def test_pictures_are_relative_to_the_manifest(tmp_path: Path, column: str) -> None:
    items = manifest(tmp_path, f'{{"{column}": "a/b.png"}}\n{{"{column}": "/c.png"}}\n{{"{column}": "s3://d/e.png"}}\n')
    assert [item.source for item in items] == [f"{tmp_path}/a/b.png", "/c.png", "s3://d/e.png"]
    assert {item.root for item in items} == {str(tmp_path)}


def test_the_first_of_the_columns_counts(tmp_path: Path) -> None:
    (item,) = manifest(tmp_path, "path,file_name,question,prompt\nx,a.png,no?,yes?", name="m.csv")
    assert item.source == f"{tmp_path}/a.png"
    assert item.questions == (QuestionFields(instruction="yes?"),)
    assert item.columns == {"path": "x", "file_name": "a.png", "question": "no?"}


def test_scalar_values_are_columns_as_texts(tmp_path: Path) -> None:
    (item,) = manifest(tmp_path, '{"image": "a.png", "n": 3, "x": 0.5, "yes": true, "none": null, "l": [1], "é": "ü"}')
    assert item.columns == {"image": "a.png", "n": "3", "x": "0.5", "yes": "true", "none": "", "é": "ü"}
    assert item.questions == ()


@pytest.mark.parametrize("choices", ['["Yes", "No"]', '"Yes, No"', '"[\\"Yes\\", \\"No\\"]"'])
def test_choices_are_a_list_or_a_text_with_commas(tmp_path: Path, choices: str) -> None:
    (item,) = manifest(tmp_path, f'{{"image": "a.png", "choices": {choices}}}')
    assert (item.questions, item.columns) == ((QuestionFields(choices=("Yes", "No")),), {"image": "a.png"})


def test_lines_about_one_picture_are_one_item_with_all_questions(tmp_path: Path) -> None:
    lines = [
        {"image": "a.png", "prompt": "One?", "split": "x"},
        {"image": "a.png", "prompt": "Two?", "input": "2", "split": "x"},
        {"image": "a.png", "prompt": "Three?", "split": "y"},
        {"image": "b.png", "prompt": "One?", "split": "y"},
        {"image": "a.png", "prompt": "One?", "split": "x"},
        {"image": "c.png"},
        {"image": "c.png"},
    ]
    items = manifest(tmp_path, "\n".join(map(json.dumps, lines)))
    assert [(item.label[-5:], [question.instruction for question in item.questions]) for item in items] == [
        ("a.png", ["One?", "Two?"]),
        ("a.png", ["Three?"]),  # a template with another column may give another question
        ("b.png", ["One?"]),
        ("a.png", ["One?"]),
        ("c.png", []),
        ("c.png", []),
    ]


def test_one_item_has_no_more_than_a_thousand_questions_or_so(tmp_path: Path) -> None:
    items = manifest(tmp_path, "".join(f'{{"image": "a.png", "prompt": "{number}?"}}\n' for number in range(1500)))
    assert [len(item.questions) for item in items] == [1024, 476]


HEAD = "picture,prompt\n"
BAD_LINES = {
    "m.jsonl": [
        *Path(__file__).with_name("bad.jsonl").read_text().splitlines(),
        "[" * 100_000,
        '{"image": "a.png", "n": ' + "9" * 5000 + "}",
        "x" * (MAX_LINE_BYTES + 1),
    ],
    "m.csv": [
        "a.png",
        "a.png,x,y",
        ",x",
        '"a"b,x',
        "a.png," + "x" * 200_000,
        "a.png," + "x" * MAX_LINE_BYTES,
        'a.png,"x\ny"z',  # the quote makes the next line part of this one
    ],
}


def test_an_unusable_line_is_an_item_with_an_error(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    said = []
    around = {"m.jsonl": ('{"image": "b.png"}\n', '{"image": "c.png"}\n', 2)}
    around["m.csv"] = (f'{HEAD}b.png,"a\nb"\n', "c.png,x\n", 4)
    for name, lines in BAD_LINES.items():
        first, last, number = around[name]
        for line in lines:
            items = manifest(tmp_path, f"{first}{line}\n\n{last}", name=name)
            assert error_codes(items) == [None, "manifest", None]
            assert items[1].label == f"{tmp_path}/{name}:{number}"
            said.append(f"{line[:40].encode()!r}: {message(items[1]).partition(', but ')[2]}")
    assert said == snapshot


@pytest.mark.parametrize(
    ("cells", "wanted"),
    [
        ('a.png, "Red, blue"', "Red, blue"),
        ('a.png, "Red,\nblue"', "Red,\nblue"),
        ('a.png, "Red" is a colour', '"Red" is a colour'),
        ('a.png, "Red', '"Red'),
    ],
)
def test_a_quote_after_a_space_is_a_letter_unless_it_closes_before_a_delimiter(
    cells: str, wanted: str, tmp_path: Path
) -> None:
    items = manifest(tmp_path, f"picture,note\n{cells}\nb.png,x\n", name="m.csv")
    assert [(item.error, dict(item.columns)["note"]) for item in items] == [(None, wanted), (None, "x")]


def test_a_quote_that_is_never_closed_is_one_error_that_names_the_lost_lines(tmp_path: Path) -> None:
    items = manifest(tmp_path, HEAD + 'a.png,x\nb.png,"oops\nc.png,x\nd.png,x\n', name="m.csv")
    assert error_codes(items) == [None, "manifest"]
    assert items[1].label == f"{tmp_path}/m.csv:3"
    assert "lines up to 5" in message(items[1])


def test_an_unusable_manifest_is_refused_before_anything_is_read(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    said = []
    for name, content in (
        ("m.json", ""),
        ("m.json", "[]"),
        ("m.json", "image,question\n"),
        ("m.csv", ""),
        ("m.csv", "picture,prompt\n"),
        ("m.csv", "a.png;x\n"),
        ("m.csv", b"sep=\xff\npicture,prompt\na.png,x\n"),
        ("m.csv", b"picture,prompt\na.png,x\nb.png,caf\xe9\n"),
        ("m.txt.gz", "a.png"),
        ("m.csv", "name,prompt\na.png,x\n"),
        ("m.csv", "picture,picture\na.png,x\n"),
        ("m.jsonl", '{"name": "a.png"}\n'),
    ):
        with pytest.raises(InputsError) as refused:
            manifest(tmp_path, content, name=name)
        said.append(refused.value.message.replace(f"{tmp_path}/", ""))
    with pytest.raises(InputsError) as refused:
        check_inputs(InputSpec(manifests=(str(tmp_path / "none.csv"),)))
    assert [*said, refused.value.message.replace(f"{tmp_path}/", "")] == snapshot


# Texts that CSV preserves. Carriage returns are left out, because CSV treats them as line ends, like line feeds.
TEXTS = (
    st.text(st.characters(exclude_characters="\r\0", codec="utf-8"), min_size=1, max_size=8).map(str.strip).filter(bool)
)
ROWS = st.lists(st.fixed_dictionaries({"picture": TEXTS, "prompt": TEXTS, "note": TEXTS}), min_size=1, max_size=6)


@settings(max_examples=40)
@given(ROWS, st.sampled_from([".jsonl", ".csv", ".tsv"]))
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]], suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"written{suffix}"
    with open(path, "w", encoding="utf-8", newline="") as file:
        if suffix == ".jsonl":
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        else:
            writer = csv.DictWriter(file, ["picture", "prompt", "note"], delimiter="\t" if suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    items = list(read_inputs(InputSpec(manifests=(str(path),))))
    assert error_codes(items) == [None] * len(items)
    assert [
        {**item.columns, "prompt": str(question.instruction)} for item in items for question in item.questions
    ] == rows
