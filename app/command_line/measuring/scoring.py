"""Asks questions with known answers, and counts exact matches."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.captioning.work_items import WorkItem, WorkQuestion
from llama_adapter.app.pictures.inputs import InputsError
from llama_adapter.app.pictures.inputs.tables import read_rows
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.text import shown_excerpt, shown_name

if TYPE_CHECKING:
    from llama_adapter.app.captioning.captioner import Captioner

KNOWN_ANSWERS = "questions.jsonl"  # in the folder of the pictures
MAX_SHOWN = 20  # wrong answers that are shown
_shown = partial(shown_excerpt, length=120)
_WHAT = "file of known answers"


class Known(Protocol):
    """A question for `grade`."""

    @property
    def task(self) -> str: ...
    @property
    def answer(self) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownAnswer:
    """A question about a picture, with its only right answer. `task` is the kind of question."""

    picture: str  # the file's name, relative to the file of known answers
    task: str
    question: str
    answer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Counts of the questions of one task: asked, and answered exactly right."""

    asked: int
    right: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The answers to all questions of a file."""

    known: tuple[KnownAnswer, ...]
    answers: tuple[str, ...]  # one per question; `error: ` and the reason for a failure
    elapsed_s: float

    def format_table(self) -> str:
        """The marks by task, and up to `MAX_SHOWN` wrong answers."""
        marks = grade(self.known, self.answers)
        asked, right = len(self.known), sum(mark.right for mark in marks.values())
        width = max(len("task"), *(len(_shown(task)) for task in marks))
        lines = [f"{'task':<{width}} {'asked':>6} {'right':>6}"]
        lines += [f"{_shown(task):<{width}} {mark.asked:>6} {mark.right:>6}" for task, mark in marks.items()]
        wrong = [
            f"wrong: {_shown(known.question)} wanted `{_shown(known.answer)}`, got `{_shown(answer)}` "
            f"({_shown(shown_name(known.picture))})"
            for known, answer in zip(self.known, self.answers, strict=True)
            if not is_right(answer, wanted=known.answer)
        ]
        lines += wrong[:MAX_SHOWN]
        if len(wrong) > MAX_SHOWN:
            lines.append(f"and {len(wrong) - MAX_SHOWN} more wrong")
        lines.append(f"{right} of {asked} answers exactly right, in {self.elapsed_s:.1f} s")
        return "\n".join(lines)


def is_right(answer: str, *, wanted: str) -> bool:
    """Whether an answer equals the wanted one, apart from surrounding white space."""
    return answer.strip() == wanted


def grade(known: Sequence[Known], answers: Sequence[str]) -> dict[str, Mark]:
    """Marks by task, in order of first occurrence. Raises ValueError if the counts differ."""
    marks: dict[str, Mark] = {}
    for each, answer in zip(known, answers, strict=True):
        mark = marks.get(each.task, Mark(asked=0, right=0))
        marks[each.task] = Mark(asked=mark.asked + 1, right=mark.right + is_right(answer, wanted=each.answer))
    return marks


def read_known_answers(path: str | os.PathLike[str]) -> tuple[KnownAnswer, ...]:
    """The questions of a JSONL file, which has an object {picture, task, question, answer} in each line; at least one.

    Surrounding white space is removed. Raises `InputsError`, which names the line, for invalid lines, and for a file
    that is empty or cannot be read.
    """
    name = os.fspath(path)
    try:
        found = tuple(_known_answers(name))
    except OSError as error:
        raise InputsError(f"Wanted to read `{shown_name(name)}`, but the system says: {error.strerror}.") from None
    if not found:
        raise InputsError(f"Wanted questions in `{shown_name(name)}`, which has none.", hint="write one in each line")
    return found


def _known_answers(path: str) -> Iterator[KnownAnswer]:
    for row in read_rows(path, what=_WHAT):
        try:
            if row.problem:
                raise ValueError(row.problem)
            texts = {name: _text(row.values.get(name), name) for name in ("picture", "task", "question", "answer")}
        except ValueError as reason:
            raise InputsError(
                f"Wanted picture, task, question and answer in `{shown_name(path)}`, line {row.line}, but {reason}.",
                hint="correct that line",
            ) from None
        yield KnownAnswer(**texts)


def _text(value: object, name: str) -> str:
    if value is None:
        raise ValueError(f"it has no `{name}`")
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"its `{name}` is no text")
    return value.strip()


def ask_all(captioner: "Captioner", known: Sequence[KnownAnswer], *, folder: str | os.PathLike[str]) -> Score:
    """Ask all questions with greedy sampling. Each picture in `folder` is read and encoded once.

    A failure, such as a missing picture, counts as wrong.
    """
    started = time.perf_counter()
    answers = [""] * len(known)
    for event in captioner.run(_work_items(known, folder=os.fspath(folder)), sampling=SamplingParams()):
        if isinstance(event, Answer):
            answers[event.index] = event.text.strip() if event.error is None else f"error: {event.error.message}"
    return Score(known=tuple(known), answers=tuple(answers), elapsed_s=time.perf_counter() - started)


def _work_items(known: Sequence[KnownAnswer], *, folder: str) -> list[WorkItem]:
    questions: dict[str, list[WorkQuestion]] = {}
    for index, each in enumerate(known):
        questions.setdefault(each.picture, []).append(WorkQuestion(index=index, prompt=each.question))
    return [
        WorkItem(picture=os.path.join(folder, picture), label=picture, questions=tuple(asked))
        for picture, asked in questions.items()
    ]
