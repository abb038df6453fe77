"""Fits the out-of-distribution detector of a trained model to the visual queries of its own pictures.

N pictures give a covariance of rank N - 1 only, so all queries of a picture share one: the pooled covariance of
Friedman, "Regularized Discriminant Analysis" (1989), with a scale for each query. It is estimated from N Q offsets. If
there are more directions than are kept, the others have their mean variance, as in probabilistic PCA (Tipping and
Bishop 1999).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from llama_adapter.app.learning.training.asking import TrainExample
from llama_adapter.app.learning.training.batches import Encodings
from llama_adapter.app.learning.training.model import TrainableModel
from llama_adapter.app.learning.training.prepare import TrainingData
from llama_adapter.app.learning.training.scoring import drawn
from llama_adapter.vision.out_of_distribution import Floats, OodDetector

# B, N pictures, Q visual queries, D their width, K kept directions, N rows

FEWEST_PICTURES: Final = 20
_FAMILIAR_SHARE: Final = 0.98  # of new pictures like the training pictures
_MOST_FITTED: Final = 1000  # pictures of each part; further ones would only take time
_MOST_KEPT: Final = 256  # directions
_LEAST_SHARE: Final = 0.01  # lower bound of a variance, as a share of the mean variance
_NUM_FOLDS: Final = 20
_TOGETHER: Final = 64  # pictures whose visual queries are computed at once


def familiarity_of(model: TrainableModel, data: TrainingData, encodings: Encodings) -> OodDetector | None:
    """A detector of pictures unlike those of the training; None for fewer than 20 pictures."""
    if model.vision is None:
        return None
    return fit_familiarity(*(_queries(model, part, encodings) for part in (data.train, data.validation)))


@torch.no_grad()
def _queries(model: TrainableModel, examples: Sequence[TrainExample], encodings: Encodings) -> Floats:
    """The visual queries of different pictures, float32 (N, Q, D)."""
    pictures = {one.example.digest: one for one in examples if one.has_picture}
    seen = drawn(list(pictures.values()), most=_MOST_FITTED)
    config = model.decoder_config
    found = [torch.zeros(0, config.num_queries, config.dim)]
    for at in range(0, len(seen), _TOGETHER):
        found.append(model.visual_query(encodings.of(seen[at : at + _TOGETHER])).float().cpu())
    return np.asarray(torch.cat(found).numpy(), np.float32)


def fit_familiarity(train_BQD: Floats, held_out_BQD: Floats) -> OodDetector | None:
    """A detector of pictures that are unlike the training pictures; None for fewer than 20, or if all are equal.

    Both are visual queries, float32 (B, Q, D), of the pictures that were trained on, and of pictures that were not,
    such as those of the validation. `held_out_BQD` may be empty; rows with numbers that are not finite are left out.
    About 2 % of new pictures like these are marked; with B < 49 pictures in all, 1 of B + 1.

    The threshold is the split-conformal quantile of held-out distances (Vovk et al. 2005). If there are too few
    held-out pictures for it, all pictures are fitted, and the distances come from detectors that were fitted without
    them (cross-conformal, Vovk 2015), because distances of fitted pictures are too small.
    """
    train_BQD, held_out_BQD = (each_BQD[np.isfinite(each_BQD).all((1, 2))] for each_BQD in (train_BQD, held_out_BQD))
    all_BQD = np.concatenate([train_BQD, held_out_BQD])
    if len(all_BQD) < FEWEST_PICTURES or not np.ptp(all_BQD, axis=0).any():
        return None
    num_held_out = len(held_out_BQD)
    if _rank(num_held_out) <= num_held_out and len(train_BQD) >= FEWEST_PICTURES:
        fitted = _fit(train_BQD)
        threshold = _quantile(fitted.distances(held_out_BQD))
    else:
        all_BQD = all_BQD[-_MOST_FITTED:]  # with the held-out ones
        fitted, distances_B = _fit(all_BQD), _left_out_distances(all_BQD)
        # If the encoder was trained too, pictures that it was trained on may be nearer than new ones.
        num_trained = len(all_BQD) - num_held_out
        threshold = max(_quantile(distances_B), distances_B[num_trained:].max(initial=0.0))
    return replace(fitted, threshold=float(threshold))


def _rank(count: int) -> int:
    """Place of the threshold among `count` ascending distances, from 1; beyond `count` if these are too few."""
    return math.ceil((count + 1) * _FAMILIAR_SHARE)


def _quantile(distances_B: NDArray[np.float64]) -> float:
    """The distance at `_rank`, or the largest one."""
    return float(np.sort(distances_B)[min(_rank(len(distances_B)), len(distances_B)) - 1])


def _left_out_distances(visual_query_BQD: Floats) -> NDArray[np.float64]:
    """The distance of each picture from a detector that was fitted to the other folds."""
    distances_B = np.empty(len(visual_query_BQD))
    shuffled_B = np.random.default_rng(0).permutation(len(visual_query_BQD))
    for left_out in np.array_split(shuffled_B, _NUM_FOLDS):
        fitted = _fit(np.delete(visual_query_BQD, left_out, axis=0))
        distances_B[left_out] = fitted.distances(visual_query_BQD[left_out])
    return distances_B


def _fit(visual_query_BQD: Floats) -> OodDetector:
    """A detector with an unlimited threshold."""
    num_pictures, num_queries, width = visual_query_BQD.shape
    mean_QD = visual_query_BQD.mean(0, dtype=np.float64).astype(np.float32)
    offset_BQD = visual_query_BQD - mean_QD
    scale_Q = np.square(offset_BQD, dtype=np.float64).sum((0, 2)) / ((num_pictures - 1) * width)  # mean variance
    scale_Q = np.maximum(scale_Q, _LEAST_SHARE * scale_Q.mean())
    rows_ND = (offset_BQD / np.sqrt(scale_Q)[:, None]).reshape(-1, width)
    _, singular_K, directions_KD = np.linalg.svd(rows_ND.astype(np.float32), full_matrices=False)
    variances_K = np.square(singular_K, dtype=np.float64) / ((num_pictures - 1) * num_queries)
    num_kept = min(len(variances_K), _MOST_KEPT)
    rest = variances_K[num_kept:].sum() / max(width - num_kept, 1)
    least = float(np.float32(max(rest, _LEAST_SHARE * variances_K.sum() / width) * scale_Q.mean()))
    return OodDetector(
        mean_QD=mean_QD,
        directions_QKD=np.repeat(directions_KD[None, :num_kept], num_queries, axis=0).astype(np.float32),
        variances_QK=np.maximum(scale_Q[:, None] * variances_K[:num_kept], least).astype(np.float32),
        least_variance=least,
        threshold=float(np.finfo(np.float32).max),
    )
