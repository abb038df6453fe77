"""The order in which pictures are labelled: the least certain and most different ones first. Pure functions.

The least certain pictures are those with the smallest margin between the two likeliest choices (Scheffer et al. 2001).
Among them, the next picture is the one that is farthest from all pictures that are known or already chosen: the
farthest-first traversal of Gonzalez 1985, which Sener and Savarese 2018 (arXiv:1708.00489) use as k-center greedy.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

# B pictures, C choices, D width of the features, K known pictures, P the least certain pictures

Floats = NDArray[np.floating]

LEAST_CERTAIN: Final = 0.25  # share of the pictures among which the most different one is searched


def next_to_label(probabilities_BC: Floats, features_BD: Floats, known_KD: Floats) -> int:
    """The index of the picture to label next.

    Parameters:
        probabilities_BC: the model's probability of each choice, (B, C) with at least one picture and two choices.
        features_BD: numbers that are close for pictures that look alike, (B, D).
        known_KD: the features of pictures that are labelled, or will be before this one; K may be 0. Then it is the
            least certain picture.

    Of pictures at the same distance, it is the less certain one.
    """
    second_B, first_B = np.partition(probabilities_BC, -2, axis=1)[:, -2:].T
    least_P = np.argsort(first_B - second_B, kind="stable")[: math.ceil(LEAST_CERTAIN * len(probabilities_BC))]
    if not len(known_KD):
        return int(least_P[0])
    return int(least_P[_squared_distances(features_BD[least_P], known_KD).min(axis=1).argmax()])


def _squared_distances(features_PD: Floats, others_KD: Floats) -> Floats:
    """The squared Euclidean distances (P, K), without an array (P, K, D)."""
    centre_D = others_KD.mean(axis=0)  # distances do not depend on it, and rounding errors are smaller around it
    features_PD, others_KD = features_PD - centre_D, others_KD - centre_D
    squares_PK = np.square(features_PD).sum(axis=1)[:, None] + np.square(others_KD).sum(axis=1)
    distances_PK: Floats = np.maximum(squares_PK - 2 * features_PD @ others_KD.T, 0.0)
    return distances_PK
