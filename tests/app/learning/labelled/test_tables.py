"""Tables become examples: the name of the answer's column decides the kind of answer."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.captioning.tasks.choose import choosing
from llama_adapter.app.learning.labelled.checks import data_digest
from llama_adapter.app.learning.labelled.example import Choices, Example, Examples
from llama_adapter.app.learning.labelled.reading import read_examples, table_examples
from llama_adapter.app.learning.labelled.rows import MAX_CHOICES, Columns, with_classes
from llama_adapter.app.pictures.inputs import InputsError
from tests.app.learning.labelled.tables import brief, example, reasons, write_lines


def read(folder: Path, *rows: dict[str, Any], **columns: Any) -> Examples:
    path = str(write_lines(folder / "data.jsonl", *rows))
    found = table_examples(path, columns=Columns(**columns))
    with_classes(found, place=path)
    return found


def only(folder: Path, row: dict[str, Any], **columns: Any) -> Example:
    found = read(folder, row, **columns)
    assert not found.problems
    (example,) = found.examples
    return example


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"picture": "a.png", "answer": "red"}, ("a.png", None, "answer", ("red",))),
        ({"image": "a.png", "question": "Colour?", "answer": " red "}, ("a.png", "Colour?", "answer", ("red",))),
        ({"file_name": "a.png", "text": "A star."}, ("a.png", None, "caption", ("A star.",))),
        ({"path": "a.png", "caption": "A star."}, ("a.png", None, "caption", ("A star.",))),
        ({"path": "a.png", "captions": ["A.", "B."]}, ("a.png", None, "caption", ("A.", "B."))),
        ({"path": "a.png", "question": "What?", "text": "A star."}, ("a.png", "What?", "answer", ("A star.",))),
        ({"picture": "a.png", "answer": 7}, ("a.png", None, "answer", ("7",))),
        ({"picture": "a.png", "answers": ["2", "two"]}, ("a.png", None, "answer", ("2", "two"))),
        ({"instruction": "Add.", "input": "1 + 1", "output": "2", "text": "all"}, (None, "Add.", "answer", ("2",))),
        ({"Picture": "a.png", "ANSWER": "red"}, ("a.png", None, "answer", ("red",))),
    ],
)
def test_a_row_is_one_example(tmp_path: Path, row: dict[str, Any], wanted: tuple[Any, ...]) -> None:
    assert brief(only(tmp_path, row), folder=tmp_path) == wanted


def test_choices_make_a_choice_and_other_columns_are_kept(tmp_path: Path) -> None:
    row = {"picture": "a.png", "question": "Red?", "answer": "YES", "choices": "yes,no", "part": "hard", "split": "Val"}
    example = only(tmp_path, row)

    spelt = ("yes", "no")
    assert (example.task, example.answers, example.choices) == ("choice", spelt[:1], spelt)
    assert example.question.choices is None
    assert (example.part, example.split, example.line) == ("hard", "validation", 1)
    assert only(tmp_path, row, choices=("never", "yes")).choices == ("never", "yes"), "those of the command win"


def test_labels_have_all_labels_of_the_table_as_choices_and_one_label_is_an_error(tmp_path: Path) -> None:
    found = read(tmp_path, *({"picture": f"{name}.png", "label": name} for name in ("cat", "dog", "axolotl")))
    assert [(one.answers, one.choices) for one in found.examples] == [
        ((name,), ("axolotl", "cat", "dog")) for name in ("cat", "dog", "axolotl")
    ]
    found = read(tmp_path, {"picture": "a.png", "label": "cat"}, {"picture": "b.png", "label": "cat"})
    assert not found.examples
    assert reasons(found, folder=tmp_path) == ["data.jsonl: all its labels are cat; wanted at least two classes"]


COLOUR, SHAPE = {"question": "Colour?", "answer": "red"}, {"question": "Shape?", "answer": "star"}
ASKED = [("a.png", "Colour?", "answer", ("red",)), ("a.png", "Shape?", "answer", ("star",))]


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([COLOUR, SHAPE], ASKED),
        ([{"questions": [COLOUR, SHAPE]}], ASKED),
        ([{"caption": text} for text in ("A.", "B.", "A.")], [("a.png", None, "caption", ("A.", "B."))]),
    ],
)
def test_a_picture_may_have_several_rows_or_a_list_of_questions(
    rows: list[dict[str, Any]], wanted: list[Any], tmp_path: Path
) -> None:
    found = read(tmp_path, *({"picture": "a.png", **row} for row in rows))
    assert [brief(one, folder=tmp_path) for one in found.examples] == wanted


def test_columns_are_for_templates_and_tell_questions_apart(tmp_path: Path) -> None:
    rows = [{"picture": "a.png", "what": what, "answer": answer} for what, answer in (("cat", "yes"), ("dog", "no"))]

    found = read(tmp_path, *rows, question="Is there a {what}?")
    assert [example.item.columns for example in found.examples] == [{"what": "cat"}, {"what": "dog"}]
    assert not found.problems
    assert len(read(tmp_path, *rows, question="Is there an animal?").problems) == 1


NO_JSON = "its cell `captions` begins like a JSON list, but is not valid JSON"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"picture": "a.png", "answer": {"is": "red"}}, "its answer is not text"),
        ({"picture": "a.png", "answer": "\ud800"}, "its answer is not UTF-8"),
        ({"picture": "a.png", "answer": "maybe", "choices": "yes,no"}, "its answer 'maybe' is none of yes, no"),
        ({"picture": "a.png", "answers": "maybe", "choices": "yes,no"}, "its answer 'maybe' is none of yes, no"),
        ({"picture": "a.png", "answer": "yes", "choices": "yes"}, "`choices` must be at least two"),
        ({"picture": "a.png", "answer": "yes", "question": 3}, "`question` is not text"),
        ({"picture": "https://a.org/a.png", "answer": "yes"}, "its picture https://a.org/a.png is an address"),
        ({"picture": "a.png", "questions": ["Red?"], "answer": "yes"}, "its `questions` are no list of objects"),
        ({"answer": "yes"}, "it has neither a picture nor a question"),
        ({"image": "A" * 4097, "answer": "a"}, "its cell `image` holds a picture as text"),
        ({"image": "data:image/png;base64,iVBORw0", "answer": "a"}, "its cell `image` holds a picture as text"),
        ({"image": "a.png", "captions": "['a', 'b']"}, NO_JSON),
        ({"image": "a.png", "captions": '["a", "b'}, NO_JSON),
    ],
)
def test_a_malformed_row_is_a_problem_with_its_line(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    found = read(tmp_path, {"picture": "b.png", "answer": "red"}, row)

    (problem,) = reasons(found, folder=tmp_path)
    assert problem.startswith(f"data.jsonl, line 2: {reason}")
    assert len(found.examples) == 1


@pytest.mark.parametrize(
    "cells", [{}, {"answer": " "}, {"answer": "", "text": "A star."}, {"answers": ["", None]}, {"answer": float("nan")}]
)
def test_rows_without_an_answer_are_left_out_with_their_number(tmp_path: Path, cells: dict[str, Any]) -> None:
    found = read(tmp_path, {"picture": "b.png", "answer": "red"}, {"picture": "a.png", **cells})

    assert (len(found.examples), found.problems) == (1, [])
    assert found.left_out.note() == f"rows without an answer: 1 (first: {tmp_path}/data.jsonl, line 2)"
    with pytest.raises(InputsError, match="everything is left out: rows without an answer: 1"):
        read_examples(str(write_lines(tmp_path / "none.jsonl", {"picture": "a.png", "answer": "", **cells})))


def test_other_answers_to_the_same_question_are_problems_and_equal_ones_count_once(tmp_path: Path) -> None:
    rows = [{"picture": "a.png", "answer": "red"}, {"picture": "a.png", "answer": "red"}]
    texts = [{"question": "2?", "answer": answer} for answer in ("two", "three")]
    found = read(tmp_path, *rows, {"picture": "a.png", "answer": "blue"}, *texts)

    assert reasons(found, folder=tmp_path) == [
        "data.jsonl, line 3: line 1 has another answer for the same picture and question",
        "data.jsonl, line 5: line 4 has another answer for the same question",
    ]
    assert [example.answers for example in found.examples] == [("red",), ("two",)]


@pytest.mark.parametrize("text", ["3", "[3]", '["a"]', "{", "[" * 100_000, b"\xff"])
def test_json_without_objects_is_refused(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "data.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)

    with pytest.raises(InputsError, match="Wanted"):
        table_examples(str(path), columns=Columns())


def test_problems_are_raised_together_and_warnings_are_not(tmp_path: Path) -> None:
    found = read(
        tmp_path, *({"picture": f"{number}.png", "answer": {}} for number in range(30)), {"picture": "a", "answer": "a"}
    )
    with pytest.raises(InputsError) as refused:
        found.require_sound()
    assert refused.value.message == "Wanted labelled data without errors, got 30:"
    assert len(refused.value.details) == 21
    assert refused.value.details[-1] == "and 10 more"

    found.problems.clear()
    found.warn("data.jsonl", "something")
    found.require_sound()
    with pytest.raises(InputsError, match="got none"):
        Examples().require_sound()


def test_more_labels_or_choices_than_can_be_compared_are_refused(tmp_path: Path) -> None:
    labels = [{"question": f"What is {number}?", "label": f"class {number}"} for number in range(MAX_CHOICES + 1)]
    found = read_examples(str(write_lines(tmp_path / "a.jsonl", *labels)))
    assert ["2,001 different labels" in one.reason for one in found.problems] == [True]
    assert not found.examples
    most = read_examples(str(write_lines(tmp_path / "b.jsonl", *labels[1:])), digests=False)
    assert {len(one.choices or ()) for one in most.examples} == {MAX_CHOICES}
    choices = [str(number) for number in range(MAX_CHOICES + 1)]
    row = {"question": "?", "answer": "1", "choices": choices}
    (refused,) = read_examples(str(write_lines(tmp_path / "c.jsonl", row))).problems
    assert "2,001 choices" in refused.reason


def test_choices_of_many_examples_are_one_value_with_one_hash() -> None:
    choices = Choices(("a", "b"))
    assert choices == ("a", "b") == pickle.loads(pickle.dumps(choices))
    assert hash(choices) == hash(("a", "b")) == hash(choices)
    assert {choices: 1}["a", "b"] == 1
    assert choosing(choices) is choosing(choices)


def test_the_digest_of_data_has_all_choices() -> None:
    def digest(*choices: str) -> str:
        return data_digest([example("0", task="choice", choices=choices)])

    many = [str(number) for number in range(200)]
    assert len({digest("0", "1"), digest("0", "2"), digest(*many), digest(*many[::-1]), digest(*many, "x")}) == 5
    assert digest(*many) == digest(*many)
