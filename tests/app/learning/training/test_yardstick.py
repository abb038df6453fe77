"""The yardstick: what simple methods reach, compared with plain computations, and the verdict on the adapter."""

import numpy as np
import pytest

from llama_adapter.app.captioning.decisions.measures import wilson_low
from llama_adapter.app.learning.scores.captions import cider_d, tokens_of
from llama_adapter.app.learning.scores.intervals import Figure
from llama_adapter.app.learning.training.yardstick import (
    _PENALTIES,
    FEATURES,
    GREY,
    Probe,
    Yardstick,
    grey_pixels,
    linear_classes,
    measure_answers,
    measure_choices,
    nearest_classes,
    ridge,
    standardised,
    stratified_folds,
)

RANDOM = np.random.default_rng(0)
ANSWERS = ["ring"] * 60 + ["disc"] * 39 + ["star"]  # the star is alone in its class
NOISE = RANDOM.normal(size=(100, 576)).astype(np.float32)
CLEAR = np.array([[answer == "ring", answer == "disc"] for answer in ANSWERS]) + RANDOM.normal(0, 0.02, (100, 2))


def shares(found: Yardstick) -> dict[tuple[str, str], float]:
    return {(one.method.split()[0], one.on): one.figure.value or 0.0 for one in found.probes}


def test_probes_find_what_the_vectors_show_and_nothing_in_noise() -> None:
    clear = CLEAR.copy()
    clear[3, 0] = np.nan
    found = measure_choices(ANSWERS, [str(place) for place in range(100)], grey_ND=NOISE, features_ND=clear)
    assert (found.task, found.answer, found.constant.value, found.constant.count) == ("choices", "ring", 0.6, 100)
    assert found.constant.low == wilson_low(60, 100)
    accuracy = shares(found)
    assert accuracy["linear", FEATURES] >= 0.97
    assert accuracy["nearest-neighbour", FEATURES] >= 0.97
    assert max(accuracy["linear", GREY], accuracy["nearest-neighbour", GREY]) <= 0.72
    best = found.probes[-1].figure
    assert best.low < accuracy["linear", FEATURES] <= best.high
    lines = found.lines()
    assert lines[:2] == [
        "simple methods: accuracy on 100 training examples, 5-fold cross-validation (95 % interval)",
        "  always “ring” 60.0 %",
    ]
    assert [line.split(":")[0] for line in lines[2:]] == ["  small grey pixels", "  the encoder's features"]


def test_copies_of_a_picture_do_not_help() -> None:
    """Each picture is there twice. If its copy were in another fold, the nearest neighbour would always be right."""
    answers = [("ring", "disc")[place % 2] for place in range(50)] * 2
    vectors = np.tile(RANDOM.normal(size=(50, 576)), (2, 1))
    names = [str(place % 50) for place in range(100)]
    copies = shares(measure_choices(answers, names, grey_ND=vectors))["nearest-neighbour", GREY]
    others = shares(measure_choices(answers, [f"{place}" for place in range(100)], grey_ND=vectors))
    assert copies < 0.8 < others["nearest-neighbour", GREY]


def test_few_examples_are_measured() -> None:
    assert measure_choices(["a", "a", "b"], ["x"] * 3, grey_ND=NOISE[:3]).probes == ()
    assert measure_choices(["a", "b"], ["", ""]).constant.value == 0.5
    for count in (2, 3, 4):
        noise, names = NOISE[:count], list("abcd")[:count]
        assert len(measure_choices(ANSWERS[-count:], names, grey_ND=noise, features_ND=noise).probes) == 4


def test_one_answer_for_all_is_scored_as_an_adapter_is() -> None:
    learned = [["yes"], ["no", "nope"], ["no", "no"], ["yes"], ["yes", "Yes."]]
    asked = [["Yes!"], ["yes", "no"], ["no"], ["maybe"]]
    found = measure_answers([("", one) for one in learned], [("", one) for one in asked])
    assert (found.task, found.answer, found.constant.value, found.exact) == ("open", "yes", 0.5, 0.25)
    lines = ["simple methods: right answers on 4 test examples", "  always “yes” 50.0 %, to the letter 25.0 %"]
    assert found.lines() == lines
    star, ring = "a red star at the left", "a blue ring at the top right"
    asked = [[star, "one star is red"], [ring], ["a disc and a small red star"]]
    found = measure_answers([("", [one]) for one in (ring, star, star)], [("", one) for one in asked])
    expected = cider_d([tokens_of(star)] * 3, [[tokens_of(text) for text in right] for right in asked]).mean()
    assert (found.task, found.answer, found.exact) == ("captions", star, 1 / 3)
    assert found.constant == Figure(value=pytest.approx(expected), count=3)
    assert expected > 1


def test_each_question_has_its_own_usual_answer() -> None:
    learned = [("Red?", ["yes"]), ("Red?", ["yes"]), ("How many?", ["2"]), ("How many?", ["3"]), ("How many?", ["3"])]
    found = measure_answers(learned, [("Red?", ["yes"]), ("How many?", ["3"]), ("How many?", ["2"]), ("Why?", ["3"])])
    assert (found.constant.value, found.answer) == (0.5, "")  # of all answers, `yes` is the first of the most frequent
    assert found.lines()[1].startswith("  the usual answer to each question 50.0 %")


def yardstick(chance: float, **probes: float) -> Yardstick:
    of = {"grey": GREY, "features": FEATURES}
    figures = {of[name]: Figure(value=value, count=1000) for name, value in probes.items()}
    measured = tuple(Probe(method="linear probe", on=on, figure=figure) for on, figure in figures.items())
    return Yardstick(task="choices", answer="ring", constant=Figure(value=chance, count=1000), probes=measured)


ONE = "which has one answer only"
NEAR = "the adapter is not clearly above chance: accuracy "
BELOW = "the adapter is below a simple method: accuracy "
PROBED = yardstick(0.2, grey=0.68, features=0.6)
TEST = "test examples; always “ring”"


@pytest.mark.parametrize(
    ("measured", "value", "count", "num_usual", "beginning"),
    [
        (PROBED, 0.215, 200, 0, f"{NEAR}21.5 % on 200 {TEST} 20.0 %, a linear probe"),
        (PROBED, 0.4, 200, 0, f"{BELOW}40.0 % on 200 test examples; a linear probe on small grey pixels 68.0 %."),
        (PROBED, 0.65, 200, 0, None),  # its interval includes the best probe
        (PROBED, 0.65, 20_000, 0, BELOW),
        (PROBED, 0.7, 200, 0, None),
        (PROBED, 0.4, 5, 0, NEAR),  # too few to say more
        (PROBED, 0.0, 1, 0, None),
        (yardstick(0.5, grey=0.45), 0.48, 200, 0, f"{NEAR}48.0 % on 200 {TEST} 50.0 %. Try"),
        (yardstick(0.5), 0.6, 10, 0, None),
        # Two hundred pictures of a class and one of another: the test has no picture of the rare class.
        (yardstick(0.99), 1.0, 20, 20, f"{NEAR}100.0 % on 20 {TEST} 100.0 % of the test, {ONE}. Try"),
        (yardstick(0.99), 1.0, 20, 19, None),
        (yardstick(0.9), 0.95, 20, 19, f"{NEAR}95.0 % on 20 {TEST} 95.0 % of the test. Try"),
        (yardstick(0.9), 0.9, 20, 18, f"{NEAR}90.0 % on 20 {TEST} 90.0 %. Try"),
        (yardstick(0.0), 0.0, 20, 0, f"{NEAR}0.0 % on 20 {TEST} 0.0 %. Try"),
        (
            *(yardstick(0.5, grey=0.97), 0.95, 20, 19),
            f"{NEAR}95.0 % on 20 {TEST} 95.0 % of the test, a linear probe on small grey pixels 97.0 %. Try",
        ),
    ],
)
def test_the_verdict_says_first_where_the_adapter_stands(
    measured: Yardstick, value: float, count: int, num_usual: int, beginning: str | None
) -> None:
    verdict = measured.verdict(Figure(value=value, count=count), num_usual=num_usual)
    assert verdict is None if beginning is None else verdict is not None and verdict.startswith(beginning), verdict
    trained = measured.verdict(Figure(value=value, count=count), num_usual=num_usual, has_eye=True)
    assert ("--tower-epochs" in (trained or "")) is (beginning is not None)


def test_captions_are_compared_by_the_interval_of_their_score() -> None:
    captions = Yardstick(task="captions", answer="a\nstar", constant=Figure(value=0.5, count=40), exact=0.1)
    for value, high, beginning in (
        (0.4, 0.6, "the adapter is not clearly above one answer for all: CIDEr-D 0.400 on 40 test examples; always “a"),
        (0.6, 0.9, None),
    ):
        verdict = captions.verdict(Figure(value=value, low=value - 0.2, high=high, count=40))
        assert (verdict or "").startswith(beginning or "\0") is (beginning is not None), verdict
        assert "\n" not in (verdict or "")


@pytest.mark.parametrize(("height", "width"), [(24, 24), (48, 96), (10, 7), (100, 37), (1, 1)])
def test_grey_pixels_are_means_of_equal_areas(height: int, width: int) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    repeated = picture.repeat(24, axis=0).repeat(24, axis=1).reshape(24, height, 24, width, 3)
    grey = repeated.mean(axis=(1, 3)) @ (0.299, 0.587, 0.114) / 255
    found = grey_pixels(picture)
    assert found.dtype == np.float32
    assert found == pytest.approx(grey.ravel(), abs=1e-6)


def test_folds_keep_copies_together_and_spread_each_class() -> None:
    labels = np.repeat([0, 1, 2], [40, 20, 1])
    pictures = [f"{label}-{place // 2}" for place, label in enumerate(labels)]
    folds = stratified_folds(labels, pictures, seed=0)
    assert all(len({fold for fold, name in zip(folds, pictures, strict=True) if name == one}) == 1 for one in pictures)
    assert [np.bincount(folds[labels == label], minlength=5).tolist() for label in (0, 1)] == [[8] * 5, [4] * 5]


def plain_ridge(vectors: np.ndarray, targets: np.ndarray, held: np.ndarray, penalty: float) -> np.ndarray:
    mean, middle = vectors.mean(axis=0), targets.mean(axis=0)
    centred = vectors - mean
    matrix = centred.T @ centred + penalty * np.eye(vectors.shape[1])
    return middle + (held - mean) @ np.linalg.solve(matrix, centred.T @ (targets - middle))


@pytest.mark.parametrize(("count", "size"), [(20, 5), (12, 40), (12, 12)])
@pytest.mark.parametrize("noise", [0.1, 10.0])
def test_ridge_regression_takes_the_penalty_of_the_smallest_leave_one_out_error(
    count: int, size: int, noise: float
) -> None:
    random = np.random.default_rng(1)
    vectors, held = random.normal(size=(count, size)), random.normal(size=(7, size))
    targets = vectors @ random.normal(size=(size, 3)) + noise * random.normal(size=(count, 3))
    values = np.linalg.svd(vectors - vectors.mean(axis=0), compute_uv=False) ** 2
    mean_variance = values.sum() / min(size, count - 1)

    def error(penalty: float) -> float:
        others = [np.arange(count) != place for place in range(count)]
        left_out = [plain_ridge(vectors[one], targets[one], vectors[~one], penalty)[0] for one in others]
        return float(((targets - left_out) ** 2).sum())

    best = min((mean_variance * factor for factor in _PENALTIES), key=error)
    assert ridge(vectors, targets, held) == pytest.approx(plain_ridge(vectors, targets, held, best), rel=1e-6, abs=1e-9)


def test_degenerate_vectors_give_the_most_frequent_class() -> None:
    labels, folds = np.array([0, 1, 1, 1, 1, 1]), np.array([0, 0, 1, 1, 2, 2])
    equal = standardised(np.full((6, 3), 7.0))
    assert not equal.any()
    assert linear_classes(equal, labels, folds).tolist() == [1] * 6


def test_neighbours_are_in_other_folds_and_compared_by_angle_or_distance() -> None:
    vectors = np.array([[1.0, 0.0], [1.0, 0.1], [9.0, 0.0], [0.0, 1.0]])
    labels, folds = np.arange(4), np.array([0, 0, 1, 1])
    assert nearest_classes(vectors, labels, folds, by_angle=True).tolist() == [2, 2, 0, 1]
    assert nearest_classes(vectors, labels, folds, by_angle=False).tolist() == [3, 3, 0, 1]
