"""Sheets of questions."""

from pathlib import Path

import pytest

from llama_adapter.app.inputs import InputsError, QuestionFields, read_question_sheet


def sheet(folder: Path, content: str, *, name: str) -> tuple[QuestionFields, ...]:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return read_question_sheet(str(path))


def test_each_line_of_a_text_is_a_question(tmp_path: Path) -> None:
    questions = sheet(tmp_path, "\ufeffWhat is it?\r\n\n# about colours\n Is it red? \n#1?\n", name="q.txt")
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


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("q.txt", "What?\n\nWhat?\n", "line 3, but it is the same as that of line 1"),
        ("q.txt", "# nothing\n", "has none"),
        ("q.csv", "question\n", "has none"),
        ("q.csv", "", "it is empty"),
        ("q.csv", "text\nWhat?\n", "line 2, but it has none of the columns prompt"),
        ("q.csv", "question,choices\nWhat?,Yes\n", "line 2, but `choices` must be at least two"),
        ("q.csv", 'question,id\n" ",1\n', "line 2, but the question is empty"),
        ("q.jsonl", '{"input": "x"}', "line 1, but it has none of the columns"),
        ("q.jsonl", '{"prompt": "a"}\nb', "line 2, but it is no JSON"),
        ("q.md", "What?", "called .txt"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, name: str, content: str, reason: str) -> None:
    with pytest.raises(InputsError, match=reason):
        sheet(tmp_path, content, name=name)


def test_a_sheet_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"O\xf9?\n")
    (tmp_path / "wide.txt").write_text("What?", encoding="utf-16")
    for name, reason in (
        ("latin.txt", "line 1, but it is not UTF-8"),
        ("none.csv", "no such file"),
        ("wide.txt", "UTF-16"),
    ):
        with pytest.raises(InputsError, match=reason):
            read_question_sheet(str(tmp_path / name))


def test_a_question_may_be_asked_with_other_choices(tmp_path: Path) -> None:
    assert len(sheet(tmp_path, 'prompt,choices\nWhat?,"a,b"\nWhat?,"a,c"\nWhat?,\n', name="q.csv")) == 3
