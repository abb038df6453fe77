"""The order of labelling: the least certain pictures first, and among them the most different ones."""

import numpy as np
import pytest

from llama_adapter.app.learning.labelled.order import next_to_label

NONE_KNOWN = np.empty((0, 2), np.float32)
LINE = np.array([[0, 0], [1, 0], [5, 0], [9, 0], [10, 0]], np.float32)


def sure(*likeliest: float) -> np.ndarray:
    """Probabilities of three choices; the second has the rest."""
    return np.array([[one, 1 - one, 0] for one in likeliest], np.float32)


@pytest.mark.parametrize(
    ("probabilities", "known", "count", "share", "expected"),
    [
        (sure(0.9, 0.6, 0.8, 0.7, 0.95), NONE_KNOWN, 1, 0.2, [1]),  # the least certain
        (sure(0.5, 0.5, 0.5, 0.5, 0.5), NONE_KNOWN, 3, 1, [0, 4, 2]),  # as far apart as possible
        (sure(0.5, 0.5, 0.5, 0.5, 0.5), LINE[[0]], 2, 1, [4, 2]),  # also far from what is labelled
        (sure(0.5, 0.6, 0.6, 0.9, 0.9), LINE[[0]], 1, 0.6, [2]),  # the farthest two are certain
        (sure(0.9, 0.8, 0.7, 0.6, 0.5), NONE_KNOWN, 9, 0.2, [4, 0, 2, 3, 1]),  # all, each once
        (sure(0.9, 0.6), LINE[:1], 0, 1, []),
    ],
)
def test_the_next_pictures_are_uncertain_and_different(
    probabilities: np.ndarray, known: np.ndarray, count: int, share: float, expected: list[int]
) -> None:
    features = LINE[: len(probabilities)]
    assert next_to_label(probabilities, features, known, count=count, share=share) == expected


def test_copies_of_known_pictures_come_last_and_no_picture_is_no_error() -> None:
    assert next_to_label(sure(0.5, 0.9), LINE[[0, 2]] + 1e4, LINE[[0]] + 1e4, count=2) == [1, 0]
    assert next_to_label(sure(), LINE[:0], LINE, count=3) == []
