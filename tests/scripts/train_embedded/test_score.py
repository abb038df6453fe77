"""Scoring: exact match, the control with shuffled pictures, and the table."""

import numpy as np

from scripts.train_embedded.questions import TASKS, Question
from scripts.train_embedded.score import draw_exam, grade, prior


def test_only_exactly_right_answers_count_after_strip() -> None:
    questions = [Question(task="exist", text="?", answer="yes")] * 4
    assert grade(questions, ["yes", " yes\n", "Yes", "yes."]) == {"exist": 50.0}


def test_the_prior_is_the_share_of_the_most_frequent_answer() -> None:
    answers = ("red", "red", "blue", "green")
    questions = [Question(task="color", text="?", answer=answer) for answer in answers]
    assert prior(questions) == {"color": 50.0}


def test_an_exam_asks_every_task_and_is_drawn_alike_from_one_seed() -> None:
    first, again, other = (draw_exam(num_pictures=12, seed=seed) for seed in (1, 1, 2))
    assert {question.task for _, question in first.questions} == set(TASKS)
    assert first.questions == again.questions
    assert first.questions != other.questions
    assert np.array_equal(np.asarray(first.pictures[3]), np.asarray(again.pictures[3]))
