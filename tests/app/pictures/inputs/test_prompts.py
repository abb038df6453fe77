"""Sheets of questions, and files of prompts."""

import os
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.pictures.inputs import InputsError, QuestionFields, read_question_sheet
from llama_adapter.app.pictures.inputs.prompts import check_prompts, prompt_inputs


def sheet(folder: Path, content: str, *, name: str) -> tuple[QuestionFields, ...]:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return read_question_sheet(str(path))


@pytest.mark.parametrize("name", ["q.txt", ".txt"])
def test_each_line_of_a_text_is_a_question(name: str, tmp_path: Path) -> None:
    questions = sheet(tmp_path, "\ufeffWhat is it?\r\n\n# about colours\n#\n Is it red? \n#1?\n", name=name)
    assert questions == tuple(QuestionFields(instruction=text) for text in ("What is it?", "Is it red?", "#1?"))


def test_tables_have_inputs_and_choices_too(tmp_path: Path) -> None:
    expected = (
        QuestionFields(instruction="Is it {colour}?", choices=("Yes", "No")),
        QuestionFields(instruction="Translate", input="into French"),
    )
    lines = '{"question": "Is it {colour}?", "choices": ["Yes", "No"]}\n{"prompt": "Translate", "input": "into French"}'
    cells = 'instruction,input,choices,id\nIs it {colour}?,,"Yes,No",1\nTranslate,into French,,2\n'
    assert sheet(tmp_path, lines, name="q.jsonl") == expected
    assert sheet(tmp_path, cells, name="q.csv") == expected
    assert sheet(tmp_path, cells.replace(",", "\t").replace("Yes\tNo", "Yes,No"), name="q.tsv") == expected


def test_an_unusable_sheet_is_refused_with_the_line(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    said = []
    for name, content in (
        ("q.txt", b"What?\n\nWhat?\n"),
        ("q.txt", b"# nothing\n"),
        ("q.csv", b"question\n"),
        ("q.csv", b""),
        ("q.csv", b"text\nWhat?\n"),
        ("q.csv", b"question,choices\nWhat?,Yes\n"),
        ("q.csv", b'question,id\n" ",1\n'),
        ("q.jsonl", b'{"input": "x"}'),
        ("q.jsonl", b'{"prompt": "a"}\nb'),
        ("q.md", b"What?"),
        ("latin.txt", b"O\xf9?\n"),
        ("none.csv", None),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(InputsError) as refused:
            read_question_sheet(str(tmp_path / name))
        said.append(refused.value.message.replace(f"{tmp_path}/", ""))
    assert said == snapshot
    with pytest.raises(InputsError, match="got `-`"):  # only a file of prompts may be stdin
        read_question_sheet("-")


def test_a_question_may_be_asked_with_other_choices(tmp_path: Path) -> None:
    assert len(sheet(tmp_path, 'prompt,choices\nWhat?,"a,b"\nWhat?,"a,c"\nWhat?,\n', name="q.csv")) == 3


# Files of prompts with the suffix .json: a list, or the JSON lines of PaddleNLP


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ('{"src": "one", "tgt": ""}\n\n{"src": ["two"], "tgt": [""]}\n', ["one", "two"]),
        ('{"src": "one"}\n{"src": ["two", "three"], "tgt": ["2", "3"]}\n', ["one", None]),
        ('\ufeff["a\u2028b", "c"]', ["a\u2028b", "c"]),
        ('\ufeff{"src": "a\u2028b"}\r\n{"src": "c"}\r\n', ["a\u2028b", "c"]),
    ],
)
def test_a_json_has_its_prompts_in_a_list_or_in_lines(text: str, prompts: list[str | None], tmp_path: Path) -> None:
    path = tmp_path / "dev.json"
    path.write_text(text, encoding="utf-8", newline="")

    check_prompts(str(path))
    found = [found.questions[0].instruction if found.questions else None for found in prompt_inputs(str(path))]
    assert found == prompts
    raw = [found.questions[0].raw for found in prompt_inputs(str(path), are_raw=True)]
    assert raw == [prompt or "two" for prompt in prompts]  # of rounds, the first is a prompt without a template


def test_a_json_that_is_no_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dev.json"
    os.symlink("/dev/zero", path)

    with pytest.raises(InputsError):
        check_prompts(str(path))


@pytest.mark.parametrize("text", ["", "{", '"text"', "1\n2", '{"src": "one"}\n{'])
def test_other_content_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "dev.json"
    path.write_text(text)

    with pytest.raises(InputsError):
        check_prompts(str(path))
