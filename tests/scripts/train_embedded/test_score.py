"""Scoring: exact match, the control with shuffled pictures, and the table."""

import numpy as np

from scripts.train_embedded.grammar import OUTSIDE_ANSWER
from scripts.train_embedded.questions import TASKS, Question
from scripts.train_embedded.score import OTHER_WORDS, draw_exam, grade, in_other_words, prior, refused


def test_scores_are_percent_of_exactly_right_answers_and_of_the_most_frequent_one() -> None:
    question = Question(task="exist", text="?", answer="yes")
    assert grade([(question, answer) for answer in ("yes", " yes\n", "Yes", "yes.")]) == {"exist": 50.0}
    many = [(question, "yes")] * 93 + [(question, "no")] * 67
    assert grade(many) == {"exist": 58.12}  # 58.125 exactly, so to the even digit
    answers = ("red", "red", "blue", "green")
    questions = [Question(task="color", text="?", answer=answer) for answer in answers]
    assert prior(questions) == {"color": 50.0}


def test_an_exam_asks_every_task_and_is_drawn_alike_from_one_seed() -> None:
    first, again, other = (draw_exam(num_pictures=12, seed=seed) for seed in (1, 1, 2))
    assert {question.task for _, question in first.questions} == set(TASKS)
    assert first.questions == again.questions
    assert first.questions != other.questions
    assert np.array_equal(np.asarray(first.pictures[3]), np.asarray(again.pictures[3]))


def test_other_words_keep_pictures_and_answers() -> None:
    exam = draw_exam(num_pictures=5, seed=1)
    for _, sentences, mistyped in OTHER_WORDS:
        other = in_other_words(exam, seed=1, sentences=sentences, mistyped=mistyped)
        assert other.pictures == exam.pictures
        assert [(index, each.task, each.answer) for index, each in other.questions] == [
            *((index, each.task, each.answer) for index, each in exam.questions),
            *((index, "outside", OUTSIDE_ANSWER) for index in range(5)),
        ]
        assert not {each.text for _, each in other.questions} & {each.text for _, each in exam.questions}


def test_refusals_are_counted_among_questions_with_an_answer() -> None:
    given = {"color": ("red", OUTSIDE_ANSWER, "blue", "red"), "outside": (OUTSIDE_ANSWER,)}
    answers = [(Question(task=task, text="?", answer="red"), each) for task, many in given.items() for each in many]
    assert refused(answers) == 25.0
