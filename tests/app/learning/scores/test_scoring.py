"""All figures of a data set: parts, classes, MME's totals, the worst answers, and a hint at a better threshold."""

import json
import math
from dataclasses import replace
from statistics import NormalDist

import pytest

from llama_adapter.app.learning.scores import scoring
from llama_adapter.app.learning.scores.intervals import Draws, Figure
from llama_adapter.app.learning.scores.outcome import Outcome
from llama_adapter.app.learning.scores.report import as_html, as_json, as_markdown
from llama_adapter.app.learning.scores.scoring import (
    LEAST_GAP,
    MME_COGNITION,
    MME_PERCEPTION,
    Scores,
    score,
    threshold_hint,
)
from tests.app.learning.scores.outcomes import outcome

FEW = Draws(count=20)


def asked(answer: str, right: str, *, digest: str = "", part: str = "", sure: float | None = None) -> Outcome:
    shares = None if sure is None else ((sure, 1 - sure) if answer == "yes" else (1 - sure, sure))
    return outcome(answer, right, choices=("yes", "no"), probabilities=shares, digest=digest, part=part)


def test_popes_table_has_a_row_for_each_part_and_one_for_all() -> None:
    found = score(
        [asked("yes", "yes", part="random"), asked("yes", "no", part="random"), asked("no", "no", part="popular")],
        draws=FEW,
    )

    assert list(found.parts) == ["(all)", "random", "popular"]
    assert {name: (own["accuracy"].value, own["accuracy"].count) for name, own in found.parts.items()} == {
        "(all)": (pytest.approx(2 / 3), 3),
        "random": (0.5, 2),
        "popular": (1.0, 1),
    }
    assert found.parts["random"]["share of yes"].value == 1.0
    assert found.parts["popular"]["precision"].value is None


def test_classes_have_the_number_of_their_examples() -> None:
    found = score([asked("yes", "yes"), asked("no", "yes"), asked("no", "no")], draws=FEW)

    assert {name: own["recall"].count for name, own in found.classes.items()} == {"yes": 2, "no": 1}
    assert found.classes["yes"]["recall"].value == 0.5


@pytest.mark.parametrize(("answer", "low", "high"), [("yes", 0.2065, 1.0), ("no", 0.0, 0.7935)])
def test_a_class_with_one_picture_is_not_certain(answer: str, low: float, high: float) -> None:
    """Wilson's interval of 1 of 1 is 1 / (1 + z²) to 1; every bootstrap draw would give the same share."""
    outcomes = [asked("no", "no", digest=f"{index}") for index in range(20)]
    found = score([*outcomes, asked(answer, "yes", digest="rare")], draws=FEW).classes

    assert (found["yes"]["recall"].low, found["yes"]["recall"].high) == pytest.approx((low, high), abs=1e-4)
    assert (found["yes"]["F1"].low == 0.0) == (answer == "no")
    assert found["yes"]["F1"].low < found["yes"]["F1"].high
    assert (found["yes"]["precision"].value is None) == (found["yes"]["precision"].low is None) == (answer == "no")
    assert found["no"]["recall"].low == pytest.approx(20 / (20 + 1.96**2), abs=1e-4)
    assert score(outcomes, draws=Draws(count=0)).classes["no"]["recall"].low is None


@pytest.mark.parametrize("answer", ["yes", "no"])
def test_scores_that_all_draws_give_are_not_certain(answer: str) -> None:
    """Six of six right, also with two questions about each picture: Wilson's interval of six, 6 / (6 + z²) to 1."""
    outcomes = [asked(answer, "yes", digest=f"{index // 2}", part="p", sure=0.6) for index in range(12)]
    found = score(outcomes, draws=FEW)
    bounds = (6 / (6 + 1.96**2), 1.0) if answer == "yes" else (0.0, 1.96**2 / (6 + 1.96**2))

    for figures in (found.figures, found.parts["p"]):
        assert (figures["accuracy"].low, figures["accuracy"].high) == pytest.approx(bounds, abs=1e-4)
    assert (found.figures["balanced accuracy"].low, found.figures["balanced accuracy"].high) == (None, None)
    exact = score([outcome(answer, "yes", digest=f"{index}") for index in range(6)], draws=FEW).figures["exact"]
    assert (exact.low, exact.high) == pytest.approx(bounds, abs=1e-4)


def test_questions_about_one_picture_widen_the_interval_of_a_class() -> None:
    """Ten copies of each answer are no further evidence: Wilson's interval alone would be as narrow as if they were."""
    outcomes = [asked("yes" if index < 3 else "no", "yes", digest=f"{index}") for index in range(6)]
    alone, copied = (score(outcomes * times, draws=Draws()).classes["yes"]["recall"] for times in (1, 10))

    assert alone.value == copied.value == 0.5
    assert (alone.low, alone.high) == pytest.approx((0.188, 0.812), abs=1e-3)
    assert copied.low <= alone.low + 0.02
    assert copied.high >= alone.high - 0.02


@pytest.mark.parametrize(("parts", "totals"), [(MME_PERCEPTION, {"perception": 2000.0}), (MME_COGNITION[1:], {})])
def test_mmes_totals_want_all_of_its_parts(parts: tuple[str, ...], totals: dict[str, float]) -> None:
    outcomes = [asked(answer, answer, digest=part, part=part) for part in parts for answer in ("yes", "no")]

    assert score(outcomes, draws=FEW).totals == totals


def test_the_surest_wrong_answers_are_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [
        asked("yes", "no", sure=0.6),
        asked("yes", "yes", sure=0.99),
        asked("no", "yes", sure=0.9),
        asked("yes", "no", sure=0.7),
    ]
    monkeypatch.setattr(scoring, "NUM_WORST", 2)
    found = score(outcomes, draws=FEW).worst

    assert [one.outcome for one in found] == [outcomes[2], outcomes[3]]
    assert [one.confidence for one in found] == [0.9, 0.7]


def test_open_answers_have_parts_of_their_own_figures() -> None:
    outcomes = [outcome("two", "2", part="count"), outcome("red", "blue", part="colour")]
    found = score(outcomes, draws=FEW)

    assert found.task == "open"
    assert found.parts["count"]["normalised"].value == 1.0
    assert found.parts["colour"]["exact"].value == 0.0
    assert [one.outcome for one in found.worst] == [outcomes[1]]


def test_a_part_has_the_figures_that_it_has_alone() -> None:
    outcomes = [
        asked(answer, "yes", digest=f"{index // 2}", part=part)
        for part in ("random", "popular")
        for index, answer in enumerate(("yes", "no", "yes", "yes", "no", "no", "yes", "no"))
    ]
    alone = score([one for one in outcomes if one.part == "popular"], draws=FEW)

    assert score(outcomes, draws=FEW).parts["popular"]["accuracy"] == alone.figures["accuracy"]
    assert score(outcomes, draws=FEW).parts["popular"] == alone.parts["popular"]


def test_choices_that_differ_by_case_alone_are_told_apart() -> None:
    one = outcome("ring", "Ring", choices=("ring", "Ring"))
    found = score([one, replace(one, answer="Ring"), replace(one, answer="RING.")], draws=FEW)

    assert found.confusion.counts == ((0, 0), (2, 1)), "in other case, an answer names the first choice"


def scored(*sure: float) -> Scores:
    """Scores for an equal number of eights and then threes, given the probability of "eight" for each."""
    outcomes = [
        outcome(
            "eight" if one > 0.5 else "three",
            "eight" if index < len(sure) / 2 else "three",
            picture=f"{index}.png",
            choices=("eight", "three"),
            probabilities=(one, 1 - one),
        )
        for index, one in enumerate(sure)
    ]
    return score(outcomes, draws=FEW)


def test_a_name_that_always_loses_is_hinted_at_in_every_report() -> None:
    found = scored(0.2, 0.3, 0.25, 0.1, 0.01, 0.02)

    assert (found.figures["accuracy"].value, found.figures["ROC-AUC"].value) == (0.5, 1.0)
    assert "balanced accuracy is 50.0%" in found.hint
    assert "ask --calibrate" in found.hint
    assert found.hint in json.loads(as_json(found))["notes"]
    for report in (as_markdown(found).replace("\\", ""), as_html(found)):
        assert "ask --calibrate" in report


def test_there_is_none_where_the_threshold_is_not_the_fault() -> None:
    assert scored(0.9, 0.8, 0.7, 0.1, 0.2, 0.3).hint is None, "all are right"
    assert scored(0.2, 0.3, 0.25, 0.3, 0.2, 0.26).hint is None, "chance"
    assert scored(0.1, 0.2, 0.3, 0.9, 0.8, 0.7).hint is None, "all are wrong, and the order too"


@pytest.mark.parametrize("distance", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0])
def test_there_is_none_for_the_best_threshold_between_two_normal_distributions(distance: float) -> None:
    normal = NormalDist()
    area, share = normal.cdf(distance / math.sqrt(2)), normal.cdf(distance / 2)
    figures = {name: Figure(value=value, count=9) for name, value in (("ROC-AUC", area), ("balanced accuracy", share))}

    assert threshold_hint(figures, num_classes=2) is None
    assert 0 <= area - share < 0.084 < LEAST_GAP
    worse = {**figures, "balanced accuracy": Figure(value=area - LEAST_GAP - 1e-9, count=9)}
    assert threshold_hint(worse, num_classes=2) is not None
    assert threshold_hint(worse, num_classes=3) is None
