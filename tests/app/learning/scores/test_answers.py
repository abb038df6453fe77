"""Open answers are normalised and scored as described on VQA's evaluation page."""

import json
from itertools import combinations
from pathlib import Path

import pytest

from llama_adapter.app.learning.scores.answers import answer_scores, normalised, vqa_score
from tests.app.learning.scores.outcomes import outcome


@pytest.mark.parametrize(
    ("text", "form"),
    json.loads(Path(__file__).with_name("normalised.json").read_text(encoding="utf-8")).items(),
)
def test_answers_are_normalised_as_vqa_describes(text: str, form: str) -> None:
    assert normalised(text) == form


@pytest.mark.parametrize("num_same", range(11))
def test_vqas_score_is_the_mean_over_all_nines_of_ten_people(num_same: int) -> None:
    references = ["two"] * num_same + ["other"] * (10 - num_same)
    nines = [min(1.0, nine.count("two") / 3) for nine in combinations(references, 9)]

    assert vqa_score("2", references) == pytest.approx(sum(nines) / 10)


def test_exact_and_normalised_take_any_reference() -> None:
    outcomes = [outcome("The dog", "cat", "dog"), outcome("cat ", "cat", "dog"), outcome("bird", "cat")]
    found = answer_scores(outcomes)

    assert {name: list(scores) for name, scores in found.items()} == {"exact": [0, 1, 0], "normalised": [1, 1, 0]}


def test_vqas_score_is_there_if_all_have_ten_references() -> None:
    ten = outcome("red", *["red"] * 2, *["blue"] * 8)

    found = answer_scores([ten, outcome("blue", *["red"] * 2, *["blue"] * 8)])
    assert found["VQA"] == pytest.approx([0.6, 1.0])
    assert "VQA" not in answer_scores([ten, outcome("red", "red")])
