"""Binomial tails and exact intervals equal the sums of their definition and published tables."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_adapter.app.learning.scores.binomial import at_most, exact_interval


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
