"""Bootstrap intervals are seeded, drawn by picture, and as wide as theory predicts."""

import numpy as np
import pytest

from llama_adapter.app.learning.scores.intervals import Draws, Figure, figures, means
from llama_adapter.app.learning.scores.outcome import Ints, picture_groups, task_of
from llama_adapter.runtime.errors import UsageError
from tests.app.learning.scores.outcomes import outcome

RIGHT = np.random.default_rng(3).random(200) < 0.7


def one_figure(values: np.ndarray, groups: Ints | None = None, *, count: int = 1000, seed: int = 0) -> Figure:
    groups = np.arange(len(values)) if groups is None else groups
    return figures(means({"mean": values.astype(float)}), groups, Draws(count=count, seed=seed))["mean"]


def width(figure: Figure) -> float:
    return figure.high - figure.low


def test_an_interval_is_as_wide_as_the_normal_one() -> None:
    found = one_figure(RIGHT, count=4000)
    share = RIGHT.mean()

    assert found.value == share
    assert width(found) == pytest.approx(2 * 1.96 * np.sqrt(share * (1 - share) / 200), rel=0.08)


def test_questions_of_one_picture_are_drawn_together() -> None:
    copied = np.repeat(RIGHT, 4)  # four questions per picture, all right or all wrong
    by_picture = one_figure(copied, np.repeat(np.arange(200), 4))

    assert by_picture.low == one_figure(RIGHT).low
    assert by_picture.high == one_figure(RIGHT).high
    assert width(by_picture) > 1.6 * width(one_figure(copied))
    assert by_picture.count == 800


def test_the_seed_decides_the_interval() -> None:
    assert one_figure(RIGHT, seed=1) == one_figure(RIGHT, seed=1)
    assert one_figure(RIGHT, seed=1) != one_figure(RIGHT, seed=2)


def test_one_picture_and_no_draws_have_no_interval() -> None:
    assert one_figure(RIGHT, np.zeros(200, dtype=np.int64)) == Figure(value=float(RIGHT.mean()), count=200)
    assert one_figure(RIGHT, count=0).low is None


def test_draws_without_the_figure_are_left_out() -> None:
    def share_of_first(chosen: Ints) -> dict[str, float | None]:
        return {"it": 0.25 if 0 in chosen else None}

    found = figures(share_of_first, np.arange(4), Draws(count=50))["it"]
    assert (found.value, found.low, found.high) == (0.25, 0.25, 0.25)


def test_pictures_are_told_by_digest_then_name_and_texts_stand_alone() -> None:
    named = (("a", "1"), ("b", "1"), ("c", ""), ("c", ""), ("", ""), ("", ""))
    given = [outcome("", "x", picture=name, digest=digest) for name, digest in named]

    assert list(picture_groups(given)) == [0, 0, 1, 1, 2, 3]


def test_the_task_is_known_by_the_data() -> None:
    assert task_of([outcome("", "x", choices=("x", "y"))]) == "choices"
    assert task_of([outcome("", "red ball")]) == "open"
    assert task_of([outcome("", "a dog runs over grass")]) == "captions"
    with pytest.raises(UsageError, match="for all examples or for none, got them for 1 of 2"):
        task_of([outcome("", "x"), outcome("", "x", choices=("x",))])
    with pytest.raises(UsageError, match="got none"):
        task_of([])


def test_probabilities_belong_to_choices_and_an_example_needs_a_right_answer() -> None:
    with pytest.raises(UsageError, match=r"Wanted 2 probabilities for `a.png`, one for each choice, got 1"):
        outcome("", "x", picture="a.png", choices=("x", "y"), probabilities=(1.0,))
    with pytest.raises(UsageError, match=r"probabilities from 0 to 1 for `a.png`"):
        outcome("", "x", picture="a.png", choices=("x", "y"), probabilities=(1.0, float("nan")))
    with pytest.raises(UsageError, match=r"at least one right answer for `a.png`"):
        outcome("", picture="a.png")
