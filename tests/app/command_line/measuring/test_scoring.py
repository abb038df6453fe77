"""Known answers: reading, asking, grading and the table."""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import pytest
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.tasks.answers import Answer, Event, TextDelta
from llama_adapter.app.captioning.work_items import WorkItem
from llama_adapter.app.command_line.measuring.scoring import (
    MAX_SHOWN,
    KnownAnswer,
    Mark,
    Score,
    ask_all,
    grade,
    read_known_answers,
)
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.inputs import InputsError
from llama_adapter.llm.engine.sampling_params import SamplingParams

LINE = {"picture": "a.png", "task": "color", "question": "What color is it?", "answer": "red"}


def known(**changes: str) -> KnownAnswer:
    return KnownAnswer(**{**LINE, **changes})


def write(folder: Path, *lines: object) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "questions.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


class Parrot:
    """A fake captioner: its answer is the question, except for pictures called bad."""

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


def test_marks_are_counted_by_task_in_the_order_of_the_questions() -> None:
    questions = [known(task="where"), *[known()] * 4, known(task="where")]

    marks = grade(questions, ["red", " red\n", "Red", "red.", "", "a red star"])

    assert list(marks.items()) == [("where", Mark(asked=2, right=1)), ("color", Mark(asked=4, right=1))]


def test_known_answers_are_read_in_order_without_blank_lines(tmp_path: Path) -> None:
    path = write(tmp_path, LINE, "", {**LINE, "answer": " blue ", "note": 3})

    assert read_known_answers(path) == (known(), known(answer="blue"))


def test_files_that_are_refused(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    lines: list[object] = [
        "{",
        '["a.png"]',
        {name: LINE[name] for name in ("picture", "task", "question")},
        {**LINE, "picture": 7},
        {**LINE, "question": " "},
        {**LINE, "task": ""},
    ]
    files = [write(tmp_path / str(number), LINE, line) for number, line in enumerate(lines)]
    told = []
    for file in (*files, write(tmp_path / "empty", ""), tmp_path / "nowhere.jsonl"):
        with pytest.raises(InputsError) as caught:
            read_known_answers(file)
        told.append(caught.value.message.replace(str(file), "FILE").partition(" (")[0])  # without Python's wording
    assert "\n".join(told) == snapshot


def test_a_picture_is_read_once_for_all_its_questions() -> None:
    first, other, second = known(question="1"), known(picture="b.png", question="2"), known(question="3")

    score, items = ask(first, other, second)

    assert [(item.picture, [question.index for question in item.questions]) for item in items] == [
        ("pictures/a.png", [0, 2]),
        ("pictures/b.png", [1]),
    ]
    assert [answer.strip() for answer in score.answers] == ["1", "2", "3"]
    assert score.elapsed_s >= 0


def table(score: Score) -> str:
    return dataclasses.replace(score, elapsed_s=1.5).format_table()


def test_the_table(snapshot: SnapshotAssertion) -> None:
    few, _ = ask(known(question="red"), known(question="green"), known(task="exist", picture="bad.png"))
    many, _ = ask(*[known() for _ in range(MAX_SHOWN + 3)])

    assert table(few) == snapshot
    assert table(many).splitlines()[-2:] == ["and 3 more wrong", "0 of 23 answers exactly right, in 1.5 s"]


def test_texts_in_the_table_are_cut_and_printable() -> None:
    hostile = "\x1b[31m\a\n" + "long " * 1000
    for field in ("task", "question", "answer", "picture"):
        score, _ = ask(known(**{field: hostile}))
        lines = table(score).splitlines()

        assert len(lines) == 4
        assert max(map(len, lines)) < 400
        assert all(line.isprintable() for line in lines)
