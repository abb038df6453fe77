"""Percentiles without keeping what they are of."""

import math
import random

import pytest

from llama_adapter.app.measuring.latencies import Latencies
from llama_adapter.app.measuring.report import percentile


def latencies(times: list[float]) -> Latencies:
    kept = Latencies()
    for time in times:
        kept.add(time)
    return kept


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.5, 0.95, 0.999, 1.0])
def test_percentiles_are_within_half_a_percent(fraction: float) -> None:
    draw = random.Random(3)
    times = [draw.lognormvariate(3.0, 2.0) for _ in range(5000)]

    assert latencies(times).percentile(fraction) == pytest.approx(percentile(sorted(times), fraction), rel=0.0051)


def test_one_time_is_all_percentiles_of_itself() -> None:
    assert {latencies([12.3456]).percentile(fraction) for fraction in (0.0, 0.5, 1.0)} == {12.3456}


def test_what_is_kept_does_not_grow_with_the_number_of_times() -> None:
    draw = random.Random(5)
    kept = latencies([draw.uniform(1, 1000) for _ in range(50_000)])

    assert len(kept._buckets) <= math.log(1000) / 0.01 + 2


def test_times_of_nothing_are_times_too() -> None:
    kept = latencies([0.0, 0.0, 5.0])

    assert kept.percentile(0.5) == pytest.approx(1e-3, rel=0.01)
    assert kept.percentile(1.0) == pytest.approx(5.0, rel=0.005)
