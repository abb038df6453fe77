"""Simple classifiers of pictures in closed form: nearest neighbours and ridge regression, cross-validated.

N examples, M held-out examples, G pictures, D numbers of a vector, R axes, C classes, H, W picture.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llama_adapter.app.captioning.decisions.measures import NUM_FOLDS
from llama_adapter.app.learning.scores.outcome import Floats, Ints

GREY_SIDE: Final = 24
_LUMA: Final = np.array([0.299, 0.587, 0.114]) / 255  # ITU-R BT.601
_PENALTIES: Final = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2)  # of ridge regression, in mean variances of the axes
_LEAST_VALUE: Final = 1e-10  # smaller eigenvalues, as a share of the largest one, are rounding errors


def grey_pixels(picture_HW3: NDArray[np.uint8]) -> NDArray[np.float32]:
    """A picture of any size as a vector (576,) of 24 x 24 grey pixels, 0 to 1: means of equal areas."""
    height, width, _ = picture_HW3.shape
    small = _areas(height) @ (picture_HW3 @ _LUMA) @ _areas(width).T
    return small.astype(np.float32).ravel()


@lru_cache(maxsize=64)
def _areas(length: int) -> Floats:
    """The share of each of `length` pixels in the mean of each area, (24, length)."""
    edges, pixels = np.linspace(0, length, GREY_SIDE + 1), np.arange(length)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return np.asarray(np.clip(overlap, 0, None) * GREY_SIDE / length, dtype=np.float64)


def stratified_folds(labels_N: Ints, pictures: Sequence[str], *, seed: int) -> Ints:
    """The fold of each example, from 0. Each class is spread over the folds, and a picture is in one fold."""
    _, first_G, picture_N = np.unique(pictures, return_index=True, return_inverse=True)
    order_G = np.lexsort((np.random.default_rng(seed).random(len(first_G)), labels_N[first_G]))
    fold_G = np.empty(len(first_G), dtype=np.int64)
    fold_G[order_G] = np.arange(len(first_G)) % NUM_FOLDS
    return fold_G[picture_N]


def nearest_classes(vectors_ND: Floats, labels_N: Ints, fold_N: Ints, *, by_angle: bool) -> Ints:
    """The class of each example's nearest neighbour in the other folds, (N,).

    Neighbours are compared by the cosine, or else by the Euclidean distance.
    """
    lengths_N = np.linalg.norm(vectors_ND, axis=1)
    near_NN = vectors_ND @ vectors_ND.T
    near_NN = near_NN / np.maximum(lengths_N, 1e-30) if by_angle else 2 * near_NN - lengths_N**2
    near_NN[fold_N[:, None] == fold_N] = -np.inf
    found_N: Ints = labels_N[near_NN.argmax(axis=1)]
    return found_N


def linear_classes(vectors_ND: Floats, labels_N: Ints, fold_N: Ints) -> Ints:
    """The class of each example, (N,), by a ridge regression on the other folds."""
    targets_NC, found_N = np.eye(int(labels_N.max()) + 1)[labels_N], np.empty_like(labels_N)
    for fold in np.unique(fold_N):
        is_held_N = fold_N == fold
        scores_MC = ridge(vectors_ND[~is_held_N], targets_NC[~is_held_N], vectors_ND[is_held_N])
        found_N[is_held_N] = scores_MC.argmax(axis=1)
    return found_N


def standardised(vectors_ND: Floats) -> Floats:
    """The vectors with mean 0 and variance 1; numbers that are equal in all vectors become 0."""
    spread_D = vectors_ND.std(axis=0)
    return np.asarray((vectors_ND - vectors_ND.mean(axis=0)) / np.where(spread_D > 0, spread_D, 1.0), dtype=np.float64)


def ridge(vectors_ND: Floats, targets_NC: Floats, held_MD: Floats) -> Floats:
    """Ridge regression with an intercept (Hoerl and Kennard, 1970): the predictions (M, C) for the held-out vectors.

    Of a few penalties, the one with the smallest squared leave-one-out error is taken (PRESS of Allen, 1974). The axes
    come from the smaller one of the matrices (D, D) and (N, N).
    """
    mean_D, mean_C = vectors_ND.mean(axis=0), targets_NC.mean(axis=0)
    centred_ND, wanted_NC = vectors_ND - mean_D, targets_NC - mean_C
    is_dual = centred_ND.shape[1] > len(centred_ND)
    values_R, axes_DR = np.linalg.eigh(centred_ND @ centred_ND.T if is_dual else centred_ND.T @ centred_ND)
    is_kept_R = values_R > _LEAST_VALUE * values_R[-1]
    values_R, axes_DR = values_R[is_kept_R], axes_DR[:, is_kept_R]
    if is_dual:
        axes_DR = centred_ND.T @ axes_DR / np.sqrt(values_R)
    along_NR = centred_ND @ axes_DR
    products_RC = along_NR.T @ wanted_NC

    def error(penalty: float) -> float:
        shrunk_R = 1 / (values_R + penalty)
        leverage_N = along_NR**2 @ shrunk_R + 1 / len(along_NR)
        residual_NC = wanted_NC - (along_NR * shrunk_R) @ products_RC
        return float(((residual_NC / np.maximum(1 - leverage_N, 1e-9)[:, None]) ** 2).sum())

    mean_variance = values_R.sum() / max(1, len(values_R))
    penalty = min((mean_variance * factor for factor in _PENALTIES), key=error)
    predicted_MC: Floats = mean_C + (held_MD - mean_D) @ axes_DR @ (products_RC / (values_R + penalty)[:, None])
    return predicted_MC
