"""The score of an evaluation has a name."""

import pytest

from llama_adapter.app.learning.scores.outcome import Outcome, Task
from llama_adapter.app.learning.training.scoring import headline
from tests.app.learning.scores.outcomes import outcome

CHOICES = [outcome("a", right, choices=("a", "b")) for right in "ab"]
OPEN = [outcome("The dog.", "dog"), outcome("cat", "dog"), outcome("cat", "dog")]
SAME = "a red star at the left"
CAPTIONS = [outcome(SAME, SAME), outcome(SAME, SAME)]  # words of all examples have the weight 0


@pytest.mark.parametrize(
    ("outcomes", "score", "name"),
    [
        ({}, 0.0, "score"),
        ({"choices": CHOICES}, 0.5, "accuracy"),
        ({"open": OPEN}, 1 / 3, "right answers"),
        ({"captions": CAPTIONS}, 0.0, "CIDEr-D"),
        ({"choices": CHOICES, "open": OPEN}, 0.4, "mean of accuracy and right answers"),
    ],
)
def test_the_score_is_the_mean_over_examples_and_has_a_name(
    outcomes: dict[Task, list[Outcome]], score: float, name: str
) -> None:
    assert headline(outcomes) == (pytest.approx(score), name)
