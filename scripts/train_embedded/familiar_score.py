"""Scores the out-of-distribution detection of a bundle: false alarms on its world, hits on other pictures."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.schemes import Precision
from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.formats import PICTURE_SUFFIXES
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.out_of_distribution import OodDetector
from llama_adapter.vision.preprocess import preprocess
from scripts.train_embedded.familiar import FRESH, OTHERS, PRECISIONS, Encode, draw_own, encoder_of
from scripts.train_embedded.other_worlds import KINDS, draw_others
from scripts.train_embedded.pictures import FAMILIAR_SEED
from scripts.train_embedded.render import Pixels

Distances = NDArray[np.float64]
Kind = tuple[str, Sequence[Pixels]]  # a name, and pictures uint8 (224, 224, 3)


def all_kinds(*, num_own: int, num_others: int, folders: Sequence[Path]) -> Iterator[Kind]:
    """Fresh pictures of the world first, then drawings of other kinds, and pictures in folders."""
    yield "of the world", draw_own(use=FRESH, count=num_own)
    yield "of the world, with a never-drawn pair", draw_own(use=FRESH, count=num_own, never_drawn="with")
    for kind in KINDS:
        yield f"drawn: {kind}", draw_others(kind, count=num_others, seed=(FAMILIAR_SEED, OTHERS))
    for folder in folders:
        is_samples = folder.resolve() == sample_pictures().resolve()
        yield "samples" if is_samples else f"folder: {folder.name}", read_folder(folder)


def read_folder(folder: Path) -> list[Pixels]:
    """The pictures in a folder, sorted by name and read as the product reads them. Raises ValueError if there are none.

    Unreadable files are skipped, with a line on stderr.
    """
    pictures = []
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() not in PICTURE_SUFFIXES:
            continue
        try:
            pictures.append(preprocess(load_picture(path).image))
        except PictureError as error:
            print(f"left out: {error.message}", file=sys.stderr)
    if not pictures:
        raise ValueError(f"There is no picture in {folder}; name a folder of pictures")
    return pictures


def score(bundle: Path, kinds: Iterator[Kind]) -> dict[str, Any]:
    """Rows of each kind: its name, pictures, percent called unfamiliar, AUROC against the first kind, percent in int8.

    Raises CheckpointError for a bundle without a detector.
    """
    ood_detector = load_bundle(bundle).ood_detector
    if ood_detector is None:
        raise CheckpointError(
            f"The bundle `{bundle}` cannot tell unfamiliar pictures",
            hint="fit it first: `python -m scripts.train_embedded familiar --bundle BUNDLE`",
        )
    encoders: dict[Precision, Encode] = {each: encoder_of(bundle, precision=each) for each in PRECISIONS}
    rows: list[list[object]] = []
    own: Distances | None = None
    for name, pictures in kinds:
        found = {each: ood_detector.distances(encode(pictures)) for each, encode in encoders.items()}
        own = found["float"] if own is None else own
        rows.append(
            [
                name,
                len(pictures),
                share_above(found["float"], ood_detector),
                round(area_under_curve(found["float"], own), 3),
                share_above(found["int8"], ood_detector),
            ]
        )
    return {"rows": rows}


def share_above(distances_B: Distances, ood_detector: OodDetector) -> float:
    """Percent of pictures beyond the threshold; distances that are not finite count as beyond it."""
    return round(100 * float((~(distances_B <= ood_detector.threshold)).mean()), 1)


def area_under_curve(others_B: Distances, own_B: Distances) -> float:
    """AUROC: how often a picture of another kind is farther away than a picture of the world; ties count half."""
    sorted_B = np.sort(own_B)
    below, upto = (np.searchsorted(sorted_B, others_B, side=side) for side in ("left", "right"))
    return float((below + upto).mean() / 2 / len(own_B))
