"""Fits the out-of-distribution detector of the embedded model, and puts it into a bundle.

For every visual query it stores the mean and the directions of variation over pictures of the world. A picture counts
as unfamiliar if its distance to those means, relative to the variation, is larger than for 99 % of the world's
pictures.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llama_adapter.app.captioning.assemble import assemble_parts
from llama_adapter.app.models.bundle import add_familiarity
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.schemes import Precision
from llama_adapter.vision.backends.base import as_array
from llama_adapter.vision.out_of_distribution import OodDetector
from scripts.train_embedded.pictures import FAMILIAR_SEED
from scripts.train_embedded.render import Pixels, draw_scene
from scripts.train_embedded.world import sample_scene

# Second numbers of the seeds: for the fit, for the threshold, and for pictures that are in neither.
FIT, THRESHOLD, FRESH = 0, 1, 2
QUANTILE: Final = 0.99
LEAST_SHARE: Final = 0.01  # lower bound of a direction's variance, as a share of the mean variance
PRECISIONS: Final[tuple[Precision, ...]] = ("float", "int8")  # in which encoders can tell
_AT_ONCE: Final = 20

Floats = NDArray[np.float32]
Encode = Callable[[Sequence[Pixels]], Floats]


def draw_own(*, use: int, count: int, never_drawn: str = "without") -> list[Pixels]:
    """Pictures of the world, uint8 (224, 224, 3) RGB. Each `use` has its own seed.

    `never_drawn` is as in `sample_scene`.
    """
    rng = np.random.default_rng([FAMILIAR_SEED, use, never_drawn == "with"])
    return [draw_scene(sample_scene(rng, never_drawn=never_drawn), rng) for _ in range(count)]


def encoder_of(bundle: Path, *, precision: Precision) -> Encode:
    """Returns a function from pictures uint8 (224, 224, 3) to the bundle's visual queries, float32 (B, Q, D)."""
    vision = assemble_parts(CaptionerSpec(model=str(bundle), device="cpu", precision=precision)).vision

    def encode(pictures: Sequence[Pixels]) -> Floats:
        parts = [np.stack(pictures[start : start + _AT_ONCE]) for start in range(0, len(pictures), _AT_ONCE)]
        return np.concatenate([as_array(vision.encode(part)) for part in parts])

    return encode


def fit(encoders: Sequence[Encode], *, num_pictures: int) -> OodDetector:
    """Fit to `num_pictures` pictures of the world as each encoder sees them, and set the threshold with half as many.

    Half of the pictures for the threshold hold a never-drawn pair. Such pictures also belong to the world, but only the
    threshold uses them. Raises ValueError for fewer than four pictures.
    """
    if num_pictures < 4:
        raise ValueError(f"Wanted four pictures or more to fit to, got {num_pictures}; 2000 are usual")
    own = draw_own(use=FIT, count=num_pictures)
    others = [
        picture
        for never_drawn in ("without", "with")
        for picture in draw_own(use=THRESHOLD, count=num_pictures // 4, never_drawn=never_drawn)
    ]
    fitted = fit_queries(np.concatenate([encode(own) for encode in encoders]))
    distances_B = fitted.distances(np.concatenate([encode(others) for encode in encoders]))
    return replace(fitted, threshold=float(np.quantile(distances_B, QUANTILE)))


def fit_queries(visual_query_BQD: Floats) -> OodDetector:
    """Fit to the visual queries of familiar pictures, float32 (B, Q, D), with an unlimited threshold.

    Memory grows with Q D². Raises ValueError for fewer than two pictures, or if all visual queries are equal.
    """
    if visual_query_BQD.ndim != 3 or len(visual_query_BQD) < 2:
        raise ValueError(f"wanted visual queries (B, Q, D) of two pictures or more, got {visual_query_BQD.shape}")
    mean_QD = visual_query_BQD.mean(0, dtype=np.float64)
    covariance_QDD = np.stack([np.cov(query_BD, rowvar=False) for query_BD in visual_query_BQD.swapaxes(0, 1)])
    values_QD, vectors_QDD = np.linalg.eigh(covariance_QDD)  # ascending, vectors in the columns
    least = LEAST_SHARE * float(values_QD.mean())
    if not least > 0:
        raise ValueError("the visual queries of all pictures are alike: nothing can be fitted to them")
    num_kept = max(int((values_QD > least).sum(1).max()), 1)
    values_QK = values_QD[:, ::-1][:, :num_kept]
    directions_QKD = vectors_QDD.swapaxes(1, 2)[:, ::-1][:, :num_kept]
    return OodDetector(
        mean_QD=mean_QD.astype(np.float32),
        directions_QKD=(directions_QKD * (values_QK > least)[..., None]).astype(np.float32),
        variances_QK=np.maximum(values_QK, least).astype(np.float32),
        least_variance=float(np.float32(least)),
        threshold=float(np.finfo(np.float32).max),
    )


def run(*, bundle: Path, num_pictures: int = 2000) -> OodDetector:
    """Fit to a bundle's encoder, in floats and in 8 bits. Puts the detector into the bundle, and returns it."""
    ood_detector = fit([encoder_of(bundle, precision=each) for each in PRECISIONS], num_pictures=num_pictures)
    add_familiarity(bundle, ood_detector)
    return ood_detector
