"""What a run measures on its encodings: simple methods before the training, and familiar pictures after it."""

# S pixels a side, C width of the features, N examples, Q visual queries, D their width

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from llama_adapter.app.learning.training.asking import TrainExample
from llama_adapter.app.learning.training.batches import Encodings
from llama_adapter.app.learning.training.familiarity import fit_familiarity
from llama_adapter.app.learning.training.model import TrainableModel
from llama_adapter.app.learning.training.prepare import TrainingData
from llama_adapter.app.learning.training.probes import grey_pixels
from llama_adapter.app.learning.training.yardstick import (
    Vectors,
    Yardstick,
    measure_answers,
    measure_choices,
    sampled,
)
from llama_adapter.vision.out_of_distribution import Floats, OodDetector

_TOGETHER: Final = 64
_MOST_FAMILIAR: Final = 1000  # pictures of each part


def yardstick_of(model: TrainableModel, data: TrainingData, encodings: Encodings) -> Yardstick | None:
    """What simple methods reach on the data before the training; None without test examples that need a constant.

    Small grey pixels are measured if the encodings are pixels, and the encoder's features if they are known.
    """
    chosen = [one for one in data.train if one.example.choices is not None and one.has_picture]
    if 2 * len(chosen) <= len(data.train):
        asked = [one.example.answers for one in data.test if one.example.choices is None]
        return measure_answers([one.example.answers for one in data.train], asked) if asked else None
    chosen = [chosen[place] for place in sampled(len(chosen))]
    grey_ND, features_ND = _vectors(model, chosen, encodings)
    return measure_choices(
        [one.example.answers[0] for one in chosen],
        [one.example.digest for one in chosen],
        grey_ND=grey_ND,
        features_ND=features_ND,
    )


@torch.no_grad()
def _vectors(
    model: TrainableModel, examples: Sequence[TrainExample], encodings: Encodings
) -> tuple[Vectors | None, Vectors | None]:
    """Grey pixels (N, 576) and the mean of CLIP's tokens (N, C) of each example; None if the encodings lack them."""
    if model.encodes not in ("pixels", "features") or model.vision is None:
        return None, None
    grey: list[Vectors] = []
    features: list[Tensor] = []
    for at in range(0, len(examples), _TOGETHER):
        encoded = encodings.of(examples[at : at + _TOGETHER])
        assert encoded is not None, "the model sees pictures"
        if model.encodes == "pixels":
            grey += [grey_pixels(picture_SS3) for picture_SS3 in encoded.numpy()]
            encoded = model.vision.features(encoded.to(model.device))
        features.append(encoded.float().mean(1).cpu())
    return np.stack(grey) if grey else None, torch.cat(features).numpy()


def familiarity_of(model: TrainableModel, data: TrainingData, encodings: Encodings) -> OodDetector | None:
    """A detector of pictures unlike those of the training; None for fewer than 20 pictures."""
    if model.vision is None:
        return None
    return fit_familiarity(*(_queries(model, part, encodings) for part in (data.train, data.validation)))


@torch.no_grad()
def _queries(model: TrainableModel, examples: Sequence[TrainExample], encodings: Encodings) -> Floats:
    """The visual queries of different pictures, float32 (N, Q, D)."""
    pictures = {one.example.digest: one for one in examples if one.has_picture}
    seen = list(pictures.values())[:_MOST_FAMILIAR]
    config = model.decoder_config
    found = [torch.zeros(0, config.num_queries, config.dim)]
    for at in range(0, len(seen), _TOGETHER):
        found.append(model.visual_query(encodings.of(seen[at : at + _TOGETHER])).float().cpu())
    return np.asarray(torch.cat(found).numpy(), np.float32)
