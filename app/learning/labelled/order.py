"""The order in which pictures are labelled: the least certain and most different ones first. Pure functions.

The least certain pictures are those with the smallest margin between the two likeliest choices (Scheffer et al. 2001).
Among them, each next picture is the one that is farthest from all pictures that are known or already chosen: the
farthest-first traversal of Gonzalez 1985, which Sener and Savarese 2018 (arXiv:1708.00489) use as k-center greedy.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

# B pictures, C choices, D width of the features, K known pictures, P the least certain pictures

Floats = NDArray[np.floating]

LEAST_CERTAIN: Final = 0.25  # share of the pictures among which the most different ones are searched


def next_to_label(
    probabilities_BC: Floats, features_BD: Floats, known_KD: Floats, *, count: int, share: float = LEAST_CERTAIN
) -> list[int]:
    """Indices of the `count` pictures to label next, in order; of all pictures if there are fewer.

    Parameters:
        probabilities_BC: the model's probability of each choice, (B, C) with at least two choices.
        features_BD: numbers that are close for pictures that look alike, (B, D).
        known_KD: the features of pictures that are labelled, or will be before these; K may be 0. Then the first
            picture is the least certain one.
        share: the share of the pictures that counts as least certain, at least `count` of them.

    Of pictures at the same distance, the less certain one comes first.
    """
    num_pictures = len(probabilities_BC)
    if num_pictures == 0:
        return []
    second_B, first_B = np.partition(probabilities_BC, -2, axis=1)[:, -2:].T
    least_P = np.argsort(first_B - second_B, kind="stable")[: max(count, math.ceil(share * num_pictures))]
    features_PD = features_BD[least_P]
    nearest_P = np.full(len(least_P), np.inf)
    if len(known_KD):
        nearest_P = _squared_distances(features_PD, known_KD).min(axis=1)
    chosen: list[int] = []
    while len(chosen) < min(count, num_pictures):
        best = int(nearest_P.argmax())
        chosen.append(int(least_P[best]))
        nearest_P = np.minimum(nearest_P, _squared_distances(features_PD, features_PD[best : best + 1])[:, 0])
        nearest_P[best] = -1.0
    return chosen


def _squared_distances(features_PD: Floats, others_KD: Floats) -> Floats:
    """The squared Euclidean distances (P, K), without an array (P, K, D)."""
    centre_D = others_KD.mean(axis=0)  # distances do not depend on it, and rounding errors are smaller around it
    features_PD, others_KD = features_PD - centre_D, others_KD - centre_D
    squares_PK = np.square(features_PD).sum(axis=1)[:, None] + np.square(others_KD).sum(axis=1)
    distances_PK: Floats = np.maximum(squares_PK - 2 * features_PD @ others_KD.T, 0.0)
    return distances_PK
