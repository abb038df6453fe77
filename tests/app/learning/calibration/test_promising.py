"""A promised precision holds on new pictures, although the threshold was chosen on the labelled ones."""

import numpy as np
import pytest

from llama_adapter.app.captioning.decisions.calibration import Calibration, Promise
from llama_adapter.app.captioning.decisions.measures import Floats, apply_temperature, find_threshold
from llama_adapter.app.learning.calibration.fitting import LEVEL, Examples, calibrate, choose
from llama_adapter.app.learning.calibration.report import headline
from llama_adapter.app.learning.scores.intervals import at_most

# N examples or new pictures, C choices

TARGET = 0.9
NEW = np.linspace(0.0, 1.0, 1001)  # scores of new pictures


def precision_of(curve: str, score_N: Floats) -> Floats:
    """The share of right answers among pictures with a score."""
    curves = {
        "rising": 0.5 + 0.5 * score_N**0.4,
        "just too low": np.full_like(score_N, TARGET - 0.002),
        "too low early": np.where(score_N > 0.7, 0.97, 0.75),
    }
    return np.asarray(curves[curve], dtype=np.float64)


def most_broken(num_runs: int) -> int:
    """The number of broken promises that a correct bound exceeds in at most one of 20 tests."""
    return next(count for count in range(num_runs) if at_most(count, num_runs, LEVEL) >= 0.95)


@pytest.mark.parametrize(
    ("curve", "count"), [("rising", 40), ("rising", 150), ("just too low", 150), ("too low early", 150)]
)
def test_a_promise_is_broken_as_seldom_as_it_says(curve: str, count: int) -> None:
    num_runs = 150
    rng, true_N = np.random.default_rng(11), precision_of(curve, NEW)
    num_broken = num_naive = 0
    for _ in range(num_runs):
        scores_N = rng.random(count)
        is_right_N = rng.random(count) < precision_of(curve, scores_N)
        chosen, promise = choose(scores_N, is_right_N, target_precision=TARGET, num_likely=count, num_pictures=count)
        if chosen is not None and promise is not None:
            num_broken += true_N[chosen.threshold <= NEW].mean() < promise.bound
        found = find_threshold(scores_N, is_right_N, precision=TARGET)
        num_naive += found is not None and true_N[found.threshold <= NEW].mean() < TARGET

    assert num_broken <= most_broken(num_runs) == 12
    assert num_naive > 3 * most_broken(num_runs), "the precision on the examples alone is no promise"


def drawn(seed: int, *, count: int, num_choices: int) -> Examples:
    """Examples of an overconfident model; the labels are drawn from its probabilities at a temperature of 2."""
    rng = np.random.default_rng(seed)
    raw_NC = rng.dirichlet([0.15] * num_choices, size=count) + 1e-6
    true_NC = apply_temperature(raw_NC / raw_NC.sum(axis=1, keepdims=True), 2.0)
    labels_N = (true_NC.cumsum(axis=1) > rng.random((count, 1))).argmax(axis=1)
    return Examples(probabilities_NC=raw_NC, labels_N=labels_N, groups_N=np.arange(count))


def fitted(examples: Examples, *, target_precision: float) -> Calibration:
    choices = ("a", "b", "c")[: examples.probabilities_NC.shape[1]]
    return calibrate(examples, choices=choices, question=None, model_digest="", target_precision=target_precision)


@pytest.mark.slow
@pytest.mark.parametrize("num_choices", [2, 3])
def test_the_fitted_temperature_breaks_no_promise(num_choices: int) -> None:
    num_runs, new = 40, drawn(1, count=20_000, num_choices=num_choices)
    num_broken = num_promised = 0
    for seed in range(num_runs):
        found = fitted(drawn(100 + seed, count=200, num_choices=num_choices), target_precision=0.9)
        scaled_NC = apply_temperature(new.probabilities_NC, found.temperature)
        answer_N = scaled_NC.argmax(axis=1) if num_choices > 2 else np.zeros(len(scaled_NC), dtype=int)
        is_taken_N = scaled_NC[np.arange(len(answer_N)), answer_N] >= found.threshold.threshold
        num_broken += (answer_N == new.labels_N)[is_taken_N].mean() < found.promise.bound
        num_promised += found.is_promised
        assert found.promise.taken_low < found.threshold.count / 200 < found.promise.taken_high

    assert num_broken <= most_broken(num_runs) == 4
    assert num_promised > num_runs / 3, "a promise that is never made is no use"


def test_the_number_of_examples_that_is_named_is_about_enough() -> None:
    few = fitted(drawn(3, count=60, num_choices=3), target_precision=0.9)
    assert not few.is_promised

    promised = [
        fitted(drawn(seed, count=few.promise.num_needed, num_choices=3), target_precision=0.9).is_promised
        for seed in range(10)
    ]
    assert sum(promised) >= 7


@pytest.mark.parametrize(("target", "needed"), [(0.8, 15), (0.9, 31), (0.95, 63), (0.99, 321)])
@pytest.mark.parametrize("count", [1, 10, 14])
def test_without_an_error_the_least_number_without_an_error_is_named(target: float, needed: int, count: int) -> None:
    """The numbers of docs/choices.md, for any number of right answers: 10 right ones once gave 17,000."""

    def all_right(count: int, *, others: int) -> Promise:
        """Of pictures that all get the right answer; `others` get the second choice."""
        scores_N = np.linspace(0, 1, count + others)
        is_right_N = np.arange(count + others) >= others
        _, promise = choose(
            scores_N, is_right_N, target_precision=target, num_likely=count, num_pictures=count + others
        )
        return promise

    assert all_right(count, others=0).num_needed == needed
    assert all_right(count, others=count).num_needed == 2 * needed, "half of the pictures get the answer"
    assert all_right(needed - 1, others=0).bound < target
    assert all_right(needed, others=0).bound == target


def test_the_headline_says_what_the_number_supposes() -> None:
    right = Examples(
        probabilities_NC=np.tile([0.1, 0.7, 0.2], (10, 1)), labels_N=np.ones(10, dtype=int), groups_N=np.arange(10)
    )

    assert headline(fitted(right, target_precision=0.95)).startswith(
        "10 examples are too few to promise 95.0 % (about 63 would do with the same share of errors); "
    )


def test_no_number_of_examples_promises_a_precision_of_1() -> None:
    scores_N = np.linspace(0, 1, 500)
    chosen, promise = choose(scores_N, np.ones(500, dtype=bool), target_precision=1.0, num_likely=500, num_pictures=500)

    assert (chosen.count, promise.num_needed) == (500, None)
    assert 0.97 < promise.bound < 1.0
