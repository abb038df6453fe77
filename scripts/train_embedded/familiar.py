"""Fits the out-of-distribution detector of the embedded model, and puts it into a bundle.

For every visual query it stores the mean and the directions of variation over pictures of the world. A picture counts
as unfamiliar if its distance to those means, relative to the variation, is larger than for 99 % of the world's
pictures.
"""

from collections.abc import Callable, Sequence
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

# Second numbers of the seeds: for the fit, for the threshold, for scores of the world, and for scores of other
# pictures.
FIT, THRESHOLD, FRESH, OTHERS = 0, 1, 2, 3
QUANTILE: Final = 0.99
PRECISIONS: Final[tuple[Precision, ...]] = ("float", "int8")  # in which bundles of the model can compute
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
    fitted = OodDetector.fit(np.concatenate([encode(own) for encode in encoders]))
    return fitted.with_threshold(np.concatenate([encode(others) for encode in encoders]), quantile=QUANTILE)


def run(*, bundle: Path, num_pictures: int = 2000) -> OodDetector:
    """Fit to a bundle's encoder, in floats and in 8 bits. Puts the detector into the bundle, and returns it."""
    ood_detector = fit([encoder_of(bundle, precision=each) for each in PRECISIONS], num_pictures=num_pictures)
    add_familiarity(bundle, ood_detector)
    return ood_detector
