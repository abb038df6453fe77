"""The yardstick: what simple methods reach, and the verdict on an adapter that is not better."""

import numpy as np
import pytest

from llama_adapter.app.captioning.decisions.measures import wilson_low
from llama_adapter.app.learning.scores.captions import cider_d, tokens_of
from llama_adapter.app.learning.scores.intervals import Figure
from llama_adapter.app.learning.training.yardstick import (
    FEATURES,
    GREY,
    Probe,
    Yardstick,
    measure_answers,
    measure_choices,
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
    assert best.low is not None
    assert best.high is not None
    assert best.low < accuracy["linear", FEATURES] <= best.high
    lines = found.lines()
    assert lines[:2] == [
        "yardstick: accuracy on 100 training examples, 5-fold cross-validation (95 % interval)",
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
        found = measure_choices(
            ANSWERS[-count:], list("abcd")[:count], grey_ND=NOISE[:count], features_ND=NOISE[:count]
        )
        assert len(found.probes) == 4


def test_one_answer_for_all_is_scored_as_an_adapter_is() -> None:
    learned = [["yes"], ["no", "nope"], ["no", "no"], ["yes"], ["yes", "Yes."]]
    asked = [["Yes!"], ["yes", "no"], ["no"], ["maybe"]]
    found = measure_answers([("", one) for one in learned], [("", one) for one in asked])
    assert (found.task, found.answer, found.constant.value, found.exact) == ("open", "yes", 0.5, 0.25)
    lines = ["yardstick: right answers on 4 test examples", "  always “yes” 50.0 %, to the letter 25.0 %"]
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
    return Yardstick(
        task="choices",
        answer="ring",
        constant=Figure(value=chance, count=1000),
        probes=tuple(
            Probe(method="linear probe", on=of[name], figure=Figure(value=value, count=1000))
            for name, value in probes.items()
        ),
    )


NEAR = "the adapter is not clearly above chance: "
BELOW = "the adapter is below a simple method: "
PROBED = yardstick(0.2, grey=0.68, features=0.6)


@pytest.mark.parametrize(
    ("measured", "value", "count", "beginning"),
    [
        (
            PROBED,
            0.215,
            200,
            f"{NEAR}accuracy 21.5 % on 200 test examples; always “ring” 20.0 %, a linear probe on small",
        ),
        (
            PROBED,
            0.4,
            200,
            f"{BELOW}accuracy 40.0 % on 200 test examples; a linear probe on small grey pixels 68.0 %. Try",
        ),
        (PROBED, 0.65, 200, None),  # its interval includes the best probe
        (PROBED, 0.65, 20_000, BELOW),
        (PROBED, 0.7, 200, None),
        (PROBED, 0.4, 5, NEAR),  # too few to say more
        (PROBED, 0.0, 1, None),
        (
            yardstick(0.5, grey=0.45),
            0.48,
            200,
            f"{NEAR}accuracy 48.0 % on 200 test examples; always “ring” 50.0 %. Try",
        ),
        (yardstick(0.5), 0.6, 10, None),
    ],
)
def test_the_verdict_says_first_where_the_adapter_stands(
    measured: Yardstick, value: float, count: int, beginning: str | None
) -> None:
    verdict = measured.verdict(Figure(value=value, count=count))
    assert verdict is None if beginning is None else verdict is not None and verdict.startswith(beginning), verdict
    trained = measured.verdict(Figure(value=value, count=count), has_eye=True)
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
