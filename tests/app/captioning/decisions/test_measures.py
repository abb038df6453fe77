"""Calibration's arithmetic: temperatures, measures and thresholds match their definitions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_adapter.app.captioning.decisions.measures import (
    LEAST_PROBABILITY,
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Floats,
    Ints,
    apply_temperature,
    best_precision,
    calibration_error,
    cross_fitted,
    find_threshold,
    fit_temperature,
    folds,
    measure,
    reliability,
    wilson_low,
)

SEEDS = st.integers(0, 10_000)


def two(*shares: float) -> Floats:
    """Probabilities of two choices, from those of the first one."""
    return np.array([[share, 1 - share] for share in shares])


def drawn(seed: int, *, count: int = 400, num_choices: int = 2, temperature: float = 1.0) -> tuple[Floats, Ints]:
    """Probabilities and labels drawn from them; a `temperature` above 1 makes the probabilities overconfident."""
    random = np.random.default_rng(seed)
    logits_NC = random.normal(size=(count, num_choices)) * 2
    true_NC = np.exp(logits_NC) / np.exp(logits_NC).sum(axis=1, keepdims=True)
    labels_N = (true_NC.cumsum(axis=1) > random.random((count, 1))).argmax(axis=1)
    return apply_temperature(true_NC, 1 / temperature), labels_N.astype(np.int64)


def nll(probabilities_NC: Floats, labels_N: Ints, temperature: float) -> float:
    return measure(apply_temperature(probabilities_NC, temperature), labels_N).nll


# Temperatures


@settings(max_examples=40)
@given(seed=SEEDS, num_choices=st.integers(2, 5), temperature=st.floats(0.2, 6.0))
def test_no_other_temperature_is_better_than_the_one_that_is_found(
    seed: int, num_choices: int, temperature: float
) -> None:
    probabilities_NC, labels_N = drawn(seed, count=60, num_choices=num_choices, temperature=temperature)
    if (probabilities_NC.argmax(axis=1) == labels_N).all():
        return
    found = fit_temperature(probabilities_NC, labels_N)

    least = nll(probabilities_NC, labels_N, found)
    for other in (*np.geomspace(MIN_TEMPERATURE, MAX_TEMPERATURE, 60), found * 0.999, found * 1.001):
        if MIN_TEMPERATURE <= other <= MAX_TEMPERATURE:
            assert nll(probabilities_NC, labels_N, float(other)) >= least - 1e-9


@pytest.mark.parametrize(
    ("shares", "labels", "temperature"),
    [
        ((0.9, 0.6, 0.2), [0, 0, 1], 1.0),  # every answer is right
        ((1.0, 0.0), [0, 1], 1.0),
        ((), [], 1.0),
        ((0.5, 0.5), [0, 1], 1.0),  # all choices are equally likely
        ((0.9, 0.6, 0.2), [1, 1, 0], MAX_TEMPERATURE),  # every answer is wrong
        ((1.0, 0.0), [1, 0], MAX_TEMPERATURE),
        ((*[0.501] * 50, 0.5), [0] * 50 + [1], MIN_TEMPERATURE),  # right with little confidence, plus a tie
    ],
)
def test_temperatures_at_the_ends(shares: tuple[float, ...], labels: list[int], temperature: float) -> None:
    assert fit_temperature(two(*shares), np.array(labels, dtype=np.int64)) == temperature


@given(seed=SEEDS, temperature=st.floats(MIN_TEMPERATURE, MAX_TEMPERATURE))
def test_a_temperature_changes_no_order_and_the_sum_stays_1(seed: int, temperature: float) -> None:
    probabilities_NC, _ = drawn(seed, count=20, num_choices=4)
    scaled_NC = apply_temperature(probabilities_NC, temperature)

    assert scaled_NC.sum(axis=1) == pytest.approx(1.0)
    assert (scaled_NC.argmax(axis=1) == probabilities_NC.argmax(axis=1)).all()
    assert (np.diff(np.sort(probabilities_NC, axis=1)) >= 0).all()
    ordered_NC = np.take_along_axis(scaled_NC, probabilities_NC.argsort(axis=1), axis=1)
    assert (np.diff(ordered_NC) >= 0).all()


# Measures


def test_measures_of_an_example_by_hand() -> None:
    metrics = measure(two(0.8, 0.8, 0.3), np.array([0, 1, 1]))

    assert metrics.accuracy == pytest.approx(2 / 3)
    assert metrics.nll == pytest.approx(-(np.log(0.8) + np.log(0.2) + np.log(0.7)) / 3)
    assert metrics.brier == pytest.approx((2 * 0.2**2 + 2 * 0.8**2 + 2 * 0.3**2) / 3)
    # Two answers with 0.8, one of which is right, and one right answer with 0.7.
    assert metrics.ece == pytest.approx((2 * abs(0.8 - 0.5) + abs(0.7 - 1.0)) / 3)
    assert calibration_error(np.array([0.8, 0.8, 0.7]), np.array([True, False, True])) == metrics.ece
    # Certainties are clipped, so that they have logarithms.
    assert np.isfinite(apply_temperature(two(1.0, 0.0), 2.0)).all()
    assert measure(two(1.0), np.array([1])).nll == pytest.approx(-np.log(LEAST_PROBABILITY))
    with pytest.raises(ValueError, match="at least one"):
        measure(two(), np.array([], dtype=np.int64))
    with pytest.raises(ValueError, match="at least one"):
        calibration_error(np.array([]), np.array([], dtype=bool))


@given(seed=SEEDS)
def test_every_example_is_in_one_bin_that_holds_its_confidence(seed: int) -> None:
    probabilities_NC, labels_N = drawn(seed, count=50)
    bins = reliability(probabilities_NC, labels_N)

    assert sum(one.count for one in bins) == 50
    assert all(one.confidence is None or one.low < one.confidence <= one.high for one in bins)
    assert (bins[0].low, bins[-1].high) == (0.0, 1.0)
    assert reliability(two(1.0), np.array([0]))[-1].count == 1


@pytest.mark.parametrize(
    ("num_right", "count", "low"), [(0, 0, 0.0), (0, 10, 0.0), (10, 10, 0.7225), (95, 100, 0.8882), (1, 2, 0.0945)]
)
def test_wilsons_bound_is_that_of_the_tables(num_right: int, count: int, low: float) -> None:
    assert wilson_low(num_right, count) == pytest.approx(low, abs=1e-4)


# Held out


def test_folds_hold_every_example_back_once_and_keep_groups_together() -> None:
    groups_N = np.array([7, 7, 1, 2, 3, 4, 5, 5, 9])
    held = list(folds(groups_N))

    assert np.sum(held, axis=0).tolist() == [1] * 9
    assert all(len(set(is_held[groups_N == group])) == 1 for is_held in held for group in groups_N)
    assert [is_held.tolist() for is_held in folds(groups_N)] == [is_held.tolist() for is_held in held]
    assert list(folds(np.array([3, 3]))) == [], "one picture cannot be held back"
    assert cross_fitted(two(0.5, 0.6), np.array([0, 1]), np.array([3, 3])) is None


def test_an_examples_own_label_does_not_change_its_held_out_probabilities() -> None:
    probabilities_NC, labels_N = drawn(3, count=50, temperature=2.0)
    other_N = labels_N.copy()
    other_N[0] = 1 - other_N[0]
    groups_N = np.arange(50)

    first, second = (cross_fitted(probabilities_NC, labels, groups_N) for labels in (labels_N, other_N))
    assert first is not None
    assert second is not None
    assert first[0].tolist() == second[0].tolist()
    assert (first != second).any()


# Thresholds


@given(
    examples=st.lists(st.tuples(st.sampled_from([0.1, 0.2, 0.35, 0.5, 0.8, 0.9]), st.booleans()), min_size=1),
    precision=st.sampled_from([0.5, 0.75, 0.9, 1.0]),
)
def test_a_threshold_has_the_precision_and_none_with_it_has_more_recall(
    examples: list[tuple[float, bool]], precision: float
) -> None:
    scores_N = np.array([score for score, _ in examples])
    is_right_N = np.array([is_right for _, is_right in examples])
    found = find_threshold(scores_N, is_right_N, precision=precision)

    possible = []
    for threshold in sorted(set(scores_N)):
        taken = scores_N >= threshold
        if is_right_N[taken].mean() >= precision:
            possible.append(is_right_N[taken].sum())
    assert (found is None) == (not possible)
    if found is not None:
        taken = scores_N >= found.threshold
        assert found.count == taken.sum()
        assert found.precision == pytest.approx(is_right_N[taken].mean())
        assert is_right_N[taken].sum() == max(possible)
        assert found.precision_low <= found.precision


def test_a_threshold_is_between_scores_and_none_without_the_precision_of_which_the_best_is_known() -> None:
    scores_N, is_right_N = np.array([0.9] * 19 + [0.1]), np.array([True] * 19 + [False])
    found = find_threshold(scores_N, is_right_N, precision=0.9)  # takes no wrong one that brings no right one
    assert found is not None
    assert (found.threshold, found.precision, found.count) == (0.5, 1.0, 19)

    scores_N, is_right_N = np.array([0.9, 0.8, 0.7]), np.array([False, True, True])
    best = best_precision(scores_N, is_right_N)

    assert find_threshold(scores_N, is_right_N, precision=0.95) is None
    assert find_threshold(scores_N, is_right_N & False, precision=0.5) is None
    assert best is not None
    assert best.precision == pytest.approx(2 / 3)
