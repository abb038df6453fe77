"""What learns the same pictures in seconds: nearest neighbours and ridge regression, in closed form.

Inputs are grey pixels, and features of the embedded model's frozen picture tower.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from llama_adapter.app.learning.training import yardstick
from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.vision.encoder import PictureEncoder, encoder_from_state
from llama_adapter.vision.pixels import PixelRule
from llama_adapter.vision.preprocess import preprocess

# N pictures to learn, M pictures to classify, F inputs, K classes, T tokens, C features

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PIXELS, MEAN, TOKENS = "grey pixels", "mean feature", "all features"
NEAREST: Final = "nearest neighbour"
_AT_ONCE = 20  # pictures in one pass of the tower
GREY_SIDE = 24  # of the pictures that pixels are taken from


def inputs_of(pictures: Sequence[Image.Image], bundle: Path) -> dict[str, Floats]:
    """The inputs of the baselines by name: arrays (N, F)."""
    features_NTC: NDArray[np.float32] = tower_features(pictures, *open_encoder(bundle)).numpy()
    return {
        PIXELS: np.stack([_grey(picture) for picture in pictures]),
        MEAN: features_NTC.mean(axis=1).astype(np.float64),
        TOKENS: features_NTC.reshape(len(features_NTC), -1).astype(np.float64),
    }


def open_encoder(bundle: Path) -> tuple[PictureEncoder, PixelRule]:
    """A bundle's encoder in float32, and the pixels that it reads."""
    model = load_bundle(bundle)
    state = {name: tensor.float() for name, tensor in model.vision_state.items()}
    return encoder_from_state(model.vision_config, state), model.vision_config.clip.pixels


@torch.no_grad()
def tower_features(pictures: Sequence[Image.Image], encoder: PictureEncoder, rule: PixelRule) -> Tensor:
    """Features of an encoder's picture tower, float32 (N, T, C)."""
    features = []
    for at in range(0, len(pictures), _AT_ONCE):
        pixels_BHWC = np.stack([preprocess(one, rule=rule) for one in pictures[at : at + _AT_ONCE]])
        features.append(encoder.features(torch.from_numpy(pixels_BHWC)))
    return torch.cat(features)


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
    """The class (M,) with the highest output of a ridge regression of one-hot targets, as in a run's yardstick."""
    likeliest_M: Ints = yardstick.ridge(learn_NF, np.eye(int(labels_N.max()) + 1)[labels_N], held_MF).argmax(axis=1)
    return likeliest_M


def _grey(picture: Image.Image) -> Floats:
    small = picture.convert("L").resize((GREY_SIDE, GREY_SIDE), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float64).ravel() / 255
