"""Scores a bundle through the product's Captioner: fresh pictures, greedy answers, exact match after strip.

Usage: python -m scripts.train_embedded.score [--model BUNDLE] [--pictures N] [--seed N], which prints JSON.

Questions are asked in the known words, and in the words of the two held-out lists, which training never uses.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.captioning.work_items import WorkItem, WorkQuestion
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.llm.engine.sampling_params import SamplingParams
from scripts.common import parser_of, positive
from scripts.train_embedded.grammar import OUTSIDE_ANSWER
from scripts.train_embedded.held_out import (
    SECOND_LIST,
    SENTENCES,
    Sentences,
    held_out,
    held_out_outside,
    is_of_training,
)
from scripts.train_embedded.pictures import SCORE_SEED
from scripts.train_embedded.questions import TASKS, Question, ask
from scripts.train_embedded.render import draw_scene
from scripts.train_embedded.world import Scene, sample_scene

ALL_TASKS = (*TASKS, "outside")
Answers = Sequence[tuple[Question, str]]
MOST_REWORDED = 500  # pictures that are asked about in other words
OTHER_WORDS = (("other_words", SENTENCES, False), ("mistyped", SENTENCES, True), ("second_list", SECOND_LIST, False))
ATTRIBUTES = ("color", "shape", "size", "where")


@dataclass(frozen=True, kw_only=True, slots=True)
class Exam:
    """Pictures and questions; `questions` are pairs (index of the picture, question)."""

    pictures: list[Image.Image]
    questions: list[tuple[int, Question]]


def draw_exam(*, num_pictures: int, seed: int, never_drawn: str = "without") -> Exam:
    """One question of every task that a picture allows. `never_drawn` is as in `sample_scene`.

    In pictures with never-drawn pairs, questions about attributes refer to an object of such a pair if possible.
    """
    rng = np.random.default_rng([SCORE_SEED, seed, never_drawn == "with"])
    pictures: list[Image.Image] = []
    questions: list[tuple[int, Question]] = []
    for index in range(num_pictures):
        scene = sample_scene(rng, never_drawn=never_drawn)
        pictures.append(Image.fromarray(draw_scene(scene, rng)))
        for task in TASKS:
            question = _ask_about_pair(scene, task, rng) if never_drawn == "with" else ask(scene, task, rng)
            if question is not None:
                questions.append((index, question))
    return Exam(pictures=pictures, questions=questions)


def in_other_words(exam: Exam, *, seed: int, sentences: Sentences = SENTENCES, mistyped: bool = False) -> Exam:
    """The exam's questions in held-out words, and an outside question per picture.

    All sentences of a task are used in turn.
    """
    rng = np.random.default_rng([SCORE_SEED, seed, 2 + mistyped])
    asked: Counter[str] = Counter()
    questions: list[tuple[int, Question]] = []
    for index, question in exam.questions:
        if index >= MOST_REWORDED:
            break
        questions.append((index, held_out(question, asked[question.task], rng, sentences=sentences, mistyped=mistyped)))
        asked[question.task] += 1
    for index in range(min(len(exam.pictures), MOST_REWORDED)):
        questions.append((index, held_out_outside(index, rng, sentences=sentences, mistyped=mistyped)))
    return Exam(pictures=exam.pictures, questions=questions)


def refused(answers: Answers) -> float:
    """Percent of answerable questions that get the answer meant for unanswerable ones."""
    given = [answer for question, answer in answers if question.task != "outside"]
    return round(100 * given.count(OUTSIDE_ANSWER) / len(given), 2)


def _ask_about_pair(scene: Scene, task: str, rng: np.random.Generator) -> Question | None:
    question = ask(scene, task, rng)
    if task not in ATTRIBUTES:
        return question
    names = {thing.color if task == "shape" else thing.shape for thing in scene if thing.is_never_drawn}
    for _ in range(30):
        if question is None or any(name in question.text.split("?")[0].split() for name in names):
            break
        question = ask(scene, task, rng)
    return question


def answer_all(captioner: Captioner, exam: Exam, *, shift: int = 0) -> list[tuple[Question, str]]:
    """The exam's questions, and their answers.

    With `shift`, each question is asked about the picture `shift` positions later.
    """
    asked: dict[int, list[WorkQuestion]] = defaultdict(list)
    for number, (index, question) in enumerate(exam.questions):
        asked[index].append(WorkQuestion(index=number, prompt=question.text))
    pictures = exam.pictures[shift:] + exam.pictures[:shift]
    items = [
        WorkItem(picture=pictures[index], label=str(index), questions=tuple(questions))
        for index, questions in asked.items()
    ]
    answers = [""] * len(exam.questions)
    for event in captioner.run(items, sampling=SamplingParams(max_new_tokens=48)):
        if isinstance(event, Answer):
            answers[event.index] = event.text.strip()
    return [(question, answer) for (_, question), answer in zip(exam.questions, answers, strict=True)]


def grade(answers: Answers) -> dict[str, float]:
    """Percent of exactly right answers, by task."""
    asked = num_asked(answers)
    missed = Counter(one["task"] for one in wrong(answers))
    return {task: round(100 * (asked[task] - missed[task]) / asked[task], 2) for task in ALL_TASKS if task in asked}


def num_asked(answers: Answers) -> dict[str, int]:
    """The number of questions, by task."""
    return dict(Counter(question.task for question, _ in answers))


def prior(questions: Iterable[Question]) -> dict[str, float]:
    """The score, in percent, of always giving a task's most frequent answer."""
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for question in questions:
        answers[question.task][question.answer] += 1
    return {
        task: round(100 * answers[task].most_common(1)[0][1] / answers[task].total(), 2)
        for task in TASKS
        if answers[task]
    }


def score(bundle: Path, *, num_pictures: int, seed: int) -> dict[str, Any]:
    """All tables of one bundle, as JSON values."""
    captioner = Captioner.load(bundle, device="cpu", dtype="float32")
    exam = draw_exam(num_pictures=num_pictures, seed=seed)
    pairs = draw_exam(num_pictures=num_pictures, seed=seed, never_drawn="with")
    answers = answer_all(captioner, exam)
    others = {
        name: answer_all(captioner, in_other_words(exam, seed=seed, sentences=sentences, mistyped=mistyped))
        for name, sentences, mistyped in OTHER_WORDS
    }
    others["second_list_new"] = [each for each in others["second_list"] if not is_of_training(each[0])]
    return {
        "model": captioner.info.digest,
        "pictures": num_pictures,
        "seed": seed,
        "scores": grade(answers),
        "asked": num_asked(answers),
        "never_drawn_pairs": grade(answer_all(captioner, pairs)),
        "asked_in_new_words": num_asked(others["second_list_new"]),
        "asked_in_other_words": num_asked(others["other_words"]),
        **{name: grade(other) for name, other in others.items()},
        "refused": {"known_words": refused(answers)} | {name: refused(other) for name, other in others.items()},
        "shuffled_pictures": grade(answer_all(captioner, exam, shift=1)),
        "most_frequent_answer": prior(question for question, _ in answers),
        "num_wrong": len(wrong(answers)),
        "wrong_examples": wrong(answers)[:20],
        "wrong_in_other_words": wrong(others["other_words"])[:20],
    }


def wrong(answers: Answers) -> list[dict[str, str]]:
    """The questions with a wrong answer, and the wrong answers."""
    return [
        {"task": question.task, "question": question.text, "wanted": question.answer, "got": answer}
        for question, answer in answers
        if answer.strip() != question.answer
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=embedded_model(), help="bundle to score")
    parser.add_argument("--pictures", type=positive(int), default=500, help="fresh pictures (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=2, help="of the pictures (default: %(default)s)")
    options = parser.parse_args(arguments)
    print(json.dumps(score(options.model, num_pictures=options.pictures, seed=options.seed), indent=1))


if __name__ == "__main__":
    main()
