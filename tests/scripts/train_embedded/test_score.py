"""Scoring: exact match, the control with shuffled pictures, and the table."""

import numpy as np

from scripts.train_embedded.questions import TASKS, Question
from scripts.train_embedded.score import draw_exam, grade, prior, table


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


def test_the_table_has_a_row_for_every_task() -> None:
    shares = {"caption": 91.25, "count": 100.0}
    result = {
        "scores": shares,
        "asked": {"caption": 8, "count": 8},
        "never_drawn_pairs": shares,
        "shuffled_pictures": shares,
        "most_frequent_answer": shares,
    }
    assert "| caption | 8 | 91.2 |" in table(result)
    assert len(table(result).splitlines()) == 4
