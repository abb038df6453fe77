"""A hint if a threshold on the probabilities separates the choices better than taking the most likely one."""

import json
import math
from statistics import NormalDist

import pytest

from llama_adapter.app.learning.scores.hints import LEAST_GAP, threshold_hint
from llama_adapter.app.learning.scores.intervals import Draws, Figure
from llama_adapter.app.learning.scores.outcome import Outcome
from llama_adapter.app.learning.scores.report import as_html, as_json, as_markdown
from llama_adapter.app.learning.scores.scoring import Scores, score

FEW = Draws(count=20)


def scored(*sure: float) -> Scores:
    """Scores for an equal number of eights and then threes, given the probability of "eight" for each."""
    outcomes = [
        Outcome(
            picture=f"{index}.png",
            question="Which?",
            answer="eight" if one > 0.5 else "three",
            references=("eight" if index < len(sure) / 2 else "three",),
            choices=("eight", "three"),
            probabilities=(one, 1 - one),
        )
        for index, one in enumerate(sure)
    ]
    return score(outcomes, draws=FEW)


def test_a_name_that_always_loses_is_hinted_at_in_every_report() -> None:
    found = scored(0.2, 0.3, 0.25, 0.1, 0.01, 0.02)

    assert (found.figures["accuracy"].value, found.figures["ROC-AUC"].value) == (0.5, 1.0)
    assert found.hint is not None
    assert "balanced accuracy is 50.0%" in found.hint
    assert "ask --calibrate" in found.hint
    assert found.hint in json.loads(as_json(found))["notes"]
    for report in (as_markdown(found).replace("\\", ""), as_html(found, thumbnail=lambda one: None)):
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
