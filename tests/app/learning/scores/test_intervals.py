"""Bootstrap intervals are seeded, drawn by picture, and as wide as theory predicts; two models on the same examples.

Binomial tails and exact intervals equal the sums of their definition and published tables.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_adapter.app.learning.scores.compare import compare, mcnemar_p
from llama_adapter.app.learning.scores.intervals import Draws, Figure, at_most, exact_interval, figures, means
from llama_adapter.app.learning.scores.outcome import Ints, Outcome, picture_groups, task_of
from llama_adapter.app.learning.scores.scoring import score
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


def test_the_seed_decides_the_interval_and_one_picture_or_no_draws_have_none() -> None:
    assert one_figure(RIGHT, seed=1) == one_figure(RIGHT, seed=1) != one_figure(RIGHT, seed=2)
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


@given(count=st.integers(0, 40), total=st.integers(0, 40), share=st.floats(0.0, 1.0))
def test_a_tail_is_the_sum_of_its_terms(count: int, total: int, share: float) -> None:
    terms = (math.comb(total, k) * share**k * (1 - share) ** (total - k) for k in range(min(count, total) + 1))

    assert at_most(count, total, share) == pytest.approx(sum(terms), abs=1e-9)


def test_tails_of_many_trials_do_not_overflow() -> None:
    assert at_most(50_000, 100_000, 0.5) == pytest.approx(0.5, abs=0.002)
    assert at_most(40_000, 100_000, 0.5) == 0.0


@pytest.mark.parametrize(
    ("num_right", "count", "low", "high"),  # the last decimals are those of the tables
    [(0, 10, 0.0, 0.3085), (10, 10, 0.6915, 1.0), (8, 10, 0.4439, 0.9748), (95, 100, 0.8872, 0.9836), (0, 0, 0.0, 1.0)],
)
def test_intervals_are_those_of_clopper_and_pearson(num_right: int, count: int, low: float, high: float) -> None:
    assert exact_interval(num_right, count) == pytest.approx((low, high), abs=1e-4)


RANDOM = np.random.default_rng(8)
ONE = RANDOM.random(120) < 0.6
OTHER = np.where(RANDOM.random(120) < 0.8, ONE, RANDOM.random(120) < 0.9)


def answered(is_right: np.ndarray) -> list[Outcome]:
    asked = {"question": "Is there a dog?", "choices": ("yes", "no")}
    answers = ("yes" if right else "no" for right in is_right)
    return [outcome(answer, "yes", picture=f"{index}.png", **asked) for index, answer in enumerate(answers)]


@pytest.mark.parametrize(
    ("one", "other", "p_value"),  # from scipy.stats.binomtest
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (7, 7, 1.0),
        (3, 9, 0.14599609375),
        (10, 2, 0.03857421875),
        (40, 61, 0.046044066929342785),
        (4900, 5100, 0.04658552770494645),
    ],
)
def test_mcnemars_p_value_is_that_of_the_binomial_test(one: int, other: int, p_value: float) -> None:
    assert mcnemar_p(one, other) == pytest.approx(p_value, rel=1e-9)


def test_examples_are_counted_by_who_answers_them_right() -> None:
    found = compare(answered(ONE), answered(OTHER)).mcnemar

    assert found.num_both_right == (ONE & OTHER).sum()
    assert found.num_one_right == (ONE & ~OTHER).sum()
    assert found.num_other_right == (OTHER & ~ONE).sum()
    assert found.num_both_wrong == (~ONE & ~OTHER).sum()
    assert found.p_value == mcnemar_p(found.num_one_right, found.num_other_right)


def test_a_difference_has_a_narrower_interval_than_its_two_figures_would_give() -> None:
    found = compare(answered(ONE), answered(OTHER), draws=Draws(count=2000))
    difference = found.differences["accuracy"]
    apart = [score(answered(side), draws=Draws(count=2000)).figures["accuracy"] for side in (ONE, OTHER)]

    assert found.values["accuracy"] == (ONE.mean(), OTHER.mean())
    assert difference.value == pytest.approx(OTHER.mean() - ONE.mean())
    changes = OTHER.astype(float) - ONE
    assert difference.high - difference.low == pytest.approx(2 * 1.96 * changes.std() / np.sqrt(120), rel=0.1)
    assert difference.high - difference.low < sum((one.high or 0) - (one.low or 0) for one in apart)


def test_captions_have_differences_and_no_mcnemar() -> None:
    right = ("a small dog runs home", "two red cars on grass", "a man sits by the sea")
    one, other = (
        [outcome(answer, text, picture=text) for text, answer in zip(right, given, strict=True)]
        for given in (("a dog", "red cars", "a man"), right)
    )
    found = compare(one, other)

    assert found.mcnemar is None
    assert found.values["BLEU-4"] == (0.0, pytest.approx(1.0))
    assert found.differences["CIDEr-D"].value == pytest.approx(10 - score(one).figures["CIDEr-D"].value)


@pytest.mark.parametrize("others", [answered(OTHER)[::-1], answered(OTHER)[:-1]])
def test_other_examples_are_refused(others: list[Outcome]) -> None:
    with pytest.raises(ValueError, match="same examples in the same order"):
        compare(answered(ONE), others)
