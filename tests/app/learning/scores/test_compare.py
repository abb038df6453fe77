"""Two models on the same examples: McNemar's exact test, and differences with intervals from the same draws."""

import numpy as np
import pytest

from llama_adapter.app.learning.scores.compare import compare, mcnemar_p
from llama_adapter.app.learning.scores.intervals import Draws
from llama_adapter.app.learning.scores.outcome import Outcome
from llama_adapter.app.learning.scores.scoring import score
from tests.app.learning.scores.outcomes import outcome

RANDOM = np.random.default_rng(8)
ONE = RANDOM.random(120) < 0.6
OTHER = np.where(RANDOM.random(120) < 0.8, ONE, RANDOM.random(120) < 0.9)


def answered(is_right: np.ndarray) -> list[Outcome]:
    return [
        outcome(
            "yes" if right else "no", "yes", picture=f"{index}.png", question="Is there a dog?", choices=("yes", "no")
        )
        for index, right in enumerate(is_right)
    ]


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
