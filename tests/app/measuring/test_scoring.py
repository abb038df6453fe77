"""Known answers: how they are read, asked and graded, and what is said of them."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.work_items import WorkItem
from llama_adapter.app.inputs import InputsError
from llama_adapter.app.measuring.scoring import (
    MAX_SHOWN,
    KnownAnswer,
    Mark,
    Score,
    ask_all,
    grade,
    is_right,
    read_known_answers,
)
from llama_adapter.app.tasks.answers import Answer, AnswerError, Event, TextDelta
from llama_adapter.llm.engine.sampling_params import SamplingParams

LINE = {"picture": "a.png", "task": "color", "question": "What color is it?", "answer": "red"}


def known(**changes: str) -> KnownAnswer:
    return KnownAnswer(**{**LINE, **changes})


def write(folder: Path, *lines: object) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


class Parrot:
    """In the place of a captioner: says each question, but for pictures called bad."""

    def __init__(self) -> None:
        self.items: list[WorkItem] = []

    def run(self, items: Iterable[WorkItem], *, sampling: SamplingParams) -> Iterator[Event]:
        assert sampling.greedy
        for item in items:
            self.items.append(item)
            for question in reversed(item.questions):
                yield TextDelta(index=question.index, text=str(question.prompt))
                yield self._answer(item, question.index, str(question.prompt))

    def _answer(self, item: WorkItem, index: int, text: str) -> Answer:
        is_bad = item.label == "bad.png"
        return Answer(
            index=index,
            picture=item.label,
            digest="",
            prompt="",
            text="" if is_bad else f" {text}\n",
            token_ids=(),
            finish="error" if is_bad else "stop",
            error=AnswerError(code="missing", message="Wanted a picture") if is_bad else None,
        )


def ask(*questions: KnownAnswer) -> tuple[Score, list[WorkItem]]:
    parrot = Parrot()
    return ask_all(cast(Captioner, parrot), questions, folder="pictures"), parrot.items


def test_an_answer_is_right_when_it_is_exactly_the_wanted_one_but_for_white_space_around_it() -> None:
    assert [is_right(answer, wanted="yes") for answer in ("yes", " yes\n", "Yes", "yes.", "")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_marks_are_counted_by_task_in_the_order_of_the_questions() -> None:
    questions = [known(task="where"), known(), known(task="where"), known()]

    marks = grade(questions, ["red", "red ", "blue", "a red star"])

    assert list(marks.items()) == [("where", Mark(asked=2, right=1)), ("color", Mark(asked=2, right=1))]


def test_as_many_answers_as_questions_are_wanted() -> None:
    with pytest.raises(ValueError, match="longer"):
        grade([known()], ["red", "blue"])


def test_known_answers_are_read_in_their_order_blank_lines_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, LINE, "", {**LINE, "answer": " blue ", "note": 3})

    assert read_known_answers(path) == (known(), known(answer="blue"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "it is not valid JSON"),
        ('["a.png"]', "it is not a JSON object"),
        ({name: LINE[name] for name in ("picture", "task", "question")}, "it has no `answer`"),
        ({**LINE, "picture": 7}, "its `picture` is no text"),
        ({**LINE, "question": " "}, "its `question` is no text"),
        ({**LINE, "task": ""}, "its `task` is no text"),
    ],
)
def test_a_faulty_line_is_named_with_what_is_wrong(line: Any, reason: str, tmp_path: Path) -> None:
    path = write(tmp_path, LINE, line)

    with pytest.raises(InputsError, match="line 2, but ") as caught:
        read_known_answers(path)

    assert reason in caught.value.message
    assert caught.value.hint == "mend that line"


def test_a_file_without_questions_or_none_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputsError, match="which has none"):
        read_known_answers(write(tmp_path, ""))
    with pytest.raises(InputsError, match=r"Wanted to read the file of known answers `.*nowhere\.jsonl`"):
        read_known_answers(tmp_path / "nowhere.jsonl")


def test_a_picture_is_given_once_with_all_its_questions_and_answers_find_theirs() -> None:
    first, other, second = known(question="1"), known(picture="b.png", question="2"), known(question="3")

    score, items = ask(first, other, second)

    assert [(item.picture, [question.index for question in item.questions]) for item in items] == [
        ("pictures/a.png", [0, 2]),
        ("pictures/b.png", [1]),
    ]
    assert [answer.strip() for answer in score.answers] == ["1", "2", "3"]
    assert score.elapsed_s >= 0


def test_the_table_has_the_marks_of_each_task_each_wrong_answer_and_the_sum() -> None:
    questions = (known(question="red"), known(question="green"), known(task="exist", picture="bad.png"))
    score, _ = ask(*questions)

    lines = score.format_table().splitlines()

    assert [line.split() for line in lines[:3]] == [
        ["task", "asked", "right"],
        ["color", "2", "1"],
        ["exist", "1", "0"],
    ]
    assert lines[3:5] == [
        "wrong: green wanted `red`, got `green` (a.png)",
        "wrong: What color is it? wanted `red`, got `error: Wanted a picture` (bad.png)",
    ]
    assert lines[5] == f"1 of 3 answers exactly right, in {score.elapsed_s:.1f} s"


def test_a_model_that_is_always_wrong_does_not_fill_the_terminal() -> None:
    score, _ = ask(*[known() for _ in range(MAX_SHOWN + 3)])

    lines = score.format_table().splitlines()

    assert sum(line.startswith("wrong: ") for line in lines) == MAX_SHOWN
    assert lines[-2:] == ["and 3 more wrong", f"0 of {MAX_SHOWN + 3} answers exactly right, in {score.elapsed_s:.1f} s"]


@pytest.mark.parametrize("field", ["task", "question", "answer", "picture"])
def test_a_long_text_is_cut_in_the_table(field: str) -> None:
    score, _ = ask(known(**{field: "long " * 1000}))

    lines = score.format_table().splitlines()

    assert len(lines) == 4
    assert max(map(len, lines)) < 400
    assert "long lo..." in "".join(lines)


def test_nothing_in_a_file_or_an_answer_acts_on_the_terminal() -> None:
    hostile = "\x1b[31m\a\n"
    score, _ = ask(known(task=f"t{hostile}t", question=f"q{hostile}q", answer=f"a{hostile}a", picture=f"p{hostile}p"))

    assert score.format_table().replace("\n", "").isprintable()
