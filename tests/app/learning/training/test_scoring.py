"""The score of an evaluation has a name, and that of a test also shows what a rare class gets."""

from dataclasses import replace

import pytest

from llama_adapter.app.learning.scores.intervals import Draws
from llama_adapter.app.learning.scores.outcome import Outcome, Task
from llama_adapter.app.learning.scores.scoring import score
from llama_adapter.app.learning.training.scoring import headline, shown_test
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


def common_and_rare(num_common: int, *, rare: int = 1, answer: str = "a") -> list[Outcome]:
    """Right answers about a common class, and the `answer` to each question about the rare class `b`."""
    labels = [("a", "a")] * num_common + [(answer, "b")] * rare
    return [outcome(given, right, picture=f"{i}", choices=("a", "b")) for i, (given, right) in enumerate(labels)]


@pytest.mark.parametrize(
    ("outcomes", "end"),
    [
        (
            common_and_rare(20),
            "accuracy 0.952 of 21 examples; balanced accuracy 0.500, as classes have 1 to 20 examples",
        ),
        (
            common_and_rare(7, rare=2, answer="b"),
            "1.000 of 9 examples; balanced accuracy 1.000, as classes have 2 to 7 examples",
        ),
        (common_and_rare(6, rare=2), "accuracy 0.750 of 8 examples"),
        (common_and_rare(4, rare=0), "1.000 of 4 examples; it says nothing about b, without examples in the test"),
        (
            [replace(one, choices=(*"abcd",)) for one in common_and_rare(20)],
            "as classes have 1 to 20 examples; it says nothing about 2 of 4 classes, without examples in the test",
        ),
        (OPEN, "test: normalised 0.333 of 3 examples"),
    ],
)
def test_classes_of_unequal_sizes_have_their_balanced_accuracy_beside(outcomes: list[Outcome], end: str) -> None:
    assert shown_test(score(outcomes, draws=Draws(count=0))).endswith(end)
