"""What learns the same pictures in seconds: nearest neighbours and ridge regression, in closed form.

Inputs are grey pixels, and features of the embedded model's frozen picture tower.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from scripts.training_proofs.baselines import tower_outputs

# N pictures to learn, M pictures to classify, F inputs, K classes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PIXELS, MEAN, TOKENS = "grey pixels", "mean feature", "all features"
NEAREST: Final = "nearest neighbour"
GREY_SIDE = 24  # of the pictures that pixels are taken from
# The weight of the penalty, relative to the mean eigenvalue of the Gram matrix.
STRENGTHS = tuple(10.0**power for power in range(-5, 3))


def inputs_of(pictures: Sequence[Image.Image], bundle: Path) -> dict[str, Floats]:
    """The inputs of the baselines by name: arrays (N, F)."""
    features_NTC, _ = tower_outputs(pictures, bundle)
    return {
        PIXELS: np.stack([_grey(picture) for picture in pictures]),
        MEAN: features_NTC.mean(axis=1).astype(np.float64),
        TOKENS: features_NTC.reshape(len(features_NTC), -1).astype(np.float64),
    }


def accuracies(
    learn: Mapping[str, Floats], labels_N: Ints, held: Mapping[str, Floats], held_labels_M: Ints
) -> dict[str, float]:
    """The share of held-out pictures that each baseline classifies correctly, by name. `chance` is the share of the
    most frequent class."""
    guesses = {NEAREST: nearest(learn[PIXELS], labels_N, held[PIXELS])}
    guesses |= {f"ridge, {name}": ridge(learn[name], labels_N, held[name]) for name in learn}
    chance = np.bincount(held_labels_M).max() / len(held_labels_M)
    return {"chance": float(chance)} | {
        name: float((guess_M == held_labels_M).mean()) for name, guess_M in guesses.items()
    }


def nearest(learn_NF: Floats, labels_N: Ints, held_MF: Floats) -> Ints:
    """The class (M,) of the picture with the least Euclidean distance."""
    squares_MN = (learn_NF**2).sum(axis=1) - 2 * held_MF @ learn_NF.T
    nearest_M: Ints = labels_N[squares_MN.argmin(axis=1)]
    return nearest_M


def ridge(learn_NF: Floats, labels_N: Ints, held_MF: Floats) -> Ints:
    """The class (M,) with the highest output of a ridge regression of one-hot targets.

    The penalty is that with the highest leave-one-out accuracy, and among equals that with the least squared error. The
    outputs for left-out pictures have a closed form (Hastie, Tibshirani, Friedman, "The Elements of Statistical
    Learning", 7.10); means are those of all pictures.
    """
    centre_F = learn_NF.mean(axis=0)
    values_N, vectors_NN = np.linalg.eigh((learn_NF - centre_F) @ (learn_NF - centre_F).T)
    targets_NK = np.eye(int(labels_N.max()) + 1)[labels_N]
    means_K = targets_NK.mean(axis=0)
    rotated_NK = vectors_NN.T @ (targets_NK - means_K)
    found = list[tuple[float, float, Floats]]()
    for strength in STRENGTHS:
        inverse_N = 1 / (np.maximum(values_N, 0) + strength * values_N.mean())
        dual_NK = vectors_NN @ (inverse_N[:, None] * rotated_NK)
        errors_NK = dual_NK / (vectors_NN**2 @ inverse_N)[:, None]
        accuracy = float(((targets_NK - errors_NK).argmax(axis=1) == labels_N).mean())
        found.append((accuracy, -float((errors_NK**2).sum()), dual_NK))
    _, _, best_NK = max(found, key=lambda one: one[:2])
    outputs_MK: Floats = (held_MF - centre_F) @ (learn_NF - centre_F).T @ best_NK + means_K
    likeliest_M: Ints = outputs_MK.argmax(axis=1)
    return likeliest_M


def _grey(picture: Image.Image) -> Floats:
    small = picture.convert("L").resize((GREY_SIDE, GREY_SIDE), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float64).ravel() / 255
