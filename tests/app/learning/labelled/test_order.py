"""The order of labelling: the least certain pictures first, and among them the most different ones."""

import numpy as np
import pytest

from llama_adapter.app.learning.labelled.order import next_to_label

LINE = np.array([[0, 0], [1, 0], [5, 0], [9, 0], [10, 0]], np.float32)


def sure(*likeliest: float) -> np.ndarray:
    """Probabilities of three choices; the second has the rest."""
    return np.array([[one, 1 - one, 0] for one in likeliest], np.float32)


@pytest.mark.parametrize(
    ("probabilities", "known", "expected"),
    [
        (sure(0.9, 0.6, 0.8, 0.7, 0.95), [], 1),  # the least certain
        (sure(0.5, 0.6, 0.9, 0.9, 0.9), [(0, 0)], 1),  # of two uncertain ones; farther ones are certain
        (sure(0.6, 0.9, 0.9, 0.9, 0.5), [(1, 0)], 4),
        (sure(0.6, 0.9, 0.9, 0.9, 0.5), [(0, 3), (9, 0)], 0),  # the nearest known one counts
        (sure(0.6, 0.9, 0.9, 0.9, 0.5), [(5, 0)], 4),  # at the same distance, the less certain one
    ],
)
@pytest.mark.parametrize("offset", [0.0, 1e4])  # beside which distances are small
def test_the_next_picture_is_uncertain_and_different(
    probabilities: np.ndarray, known: list[tuple[int, int]], expected: int, offset: float
) -> None:
    others = np.array(known, np.float32).reshape(-1, 2) + np.float32(offset)
    assert next_to_label(probabilities, LINE + np.float32(offset), others) == expected
