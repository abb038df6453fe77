"""Logistic regression on pixels, on features of the embedded model's picture tower, and on its visual queries."""

import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.vision.encoder import encoder_from_state
from llama_adapter.vision.preprocess import preprocess
from scripts.training_proofs.digits import CHOICES, Scans, divide, picture

# N scans, T tokens (the class token first), C features, Q queries, D width

Floats = NDArray[np.float32]

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # C of scikit-learn: the inverse of the penalty's weight
_AT_ONCE = 20


def inputs_of(scans: Scans, bundle: Path) -> dict[str, Floats]:
    """The inputs of the regressions for each scan, by name: float32 arrays (N, F)."""
    features_NTC, queries_NF = tower_outputs(map(picture, scans.ink_NHW), bundle)
    return {
        "pixels of the scan": scans.ink_NHW.reshape(len(scans.ink_NHW), -1).astype(np.float32),
        "features, class token": features_NTC[:, 0],
        "features, mean of all tokens": features_NTC.mean(axis=1),
        "features, all tokens": features_NTC.reshape(len(features_NTC), -1),
        "visual queries": queries_NF,
    }


@torch.no_grad()
def tower_outputs(pictures: Iterable[Image.Image], bundle: Path) -> tuple[Floats, Floats]:
    """Features of a bundle's frozen picture tower (N, T, C), and its visual queries (N, Q * D), as float32."""
    model = load_bundle(bundle)
    encoder = encoder_from_state(
        model.vision_config, {name: tensor.float() for name, tensor in model.vision_state.items()}
    )
    side = model.vision_config.clip.image_size
    features, queries = [], []
    remaining = iter(pictures)
    while some := list(itertools.islice(remaining, _AT_ONCE)):
        pixels_BHWC = np.stack([preprocess(one, size=side) for one in some])
        features_BTC = encoder.features(torch.from_numpy(pixels_BHWC))
        features.append(features_BTC.numpy())
        queries.append(encoder.query(features_BTC).flatten(1).numpy())
    return np.concatenate(features), np.concatenate(queries)


def accuracies(
    scans: Scans, inputs: Mapping[str, Floats], *, sizes: Sequence[int], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """A row per input. `accuracy` has, per number of training scans a digit, a list of held-out accuracies by seed."""
    return [
        {
            "input": name,
            "width": input_NF.shape[1],
            "accuracy": [
                [_accuracy(scans.digits_N, input_NF, size=size, seed=seed) for seed in seeds] for size in sizes
            ],
        }
        for name, input_NF in inputs.items()
    ]


def _accuracy(digits_N: NDArray[np.int64], input_NF: Floats, *, size: int, seed: int) -> float:
    """Accuracy on the held-out scans; the penalty is chosen on the validation part."""
    from sklearn.decomposition import PCA
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    parts = divide(digits_N, seed=seed)
    train = parts.train[: size * len(CHOICES)]
    scaler = StandardScaler().fit(input_NF[train])
    scaled_NF = scaler.transform(input_NF)
    if scaled_NF.shape[1] > len(train):
        # Project all scans into the space spanned by the training scans: the solution is the same, and faster to find.
        scaled_NF = PCA(svd_solver="full").fit(scaled_NF[train]).transform(scaled_NF)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = [
            LogisticRegression(C=strength, max_iter=1000).fit(scaled_NF[train], digits_N[train])
            for strength in STRENGTHS
        ]
    best = max(fitted, key=lambda one: one.score(scaled_NF[parts.validation], digits_N[parts.validation]))
    return float(best.score(scaled_NF[parts.held_out], digits_N[parts.held_out]))
