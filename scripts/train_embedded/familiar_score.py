"""Scores the out-of-distribution detection of a bundle: false alarms on its world, hits on other pictures."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.schemes import Precision
from llama_adapter.runtime.terminal.run_guarded import run_guarded
from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.formats import PICTURE_SUFFIXES
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.out_of_distribution import OodDetector
from llama_adapter.vision.preprocess import preprocess
from scripts.common import parser_of, table
from scripts.train_embedded.familiar import FRESH, OTHERS, PRECISIONS, Encode, draw_own, encoder_of
from scripts.train_embedded.other_worlds import KINDS, draw_others
from scripts.train_embedded.pictures import FAMILIAR_SEED
from scripts.train_embedded.render import Pixels

HEADS: Final = ("pictures", "number", "called unfamiliar, float (%)", "AUROC, float", "called unfamiliar, int8 (%)")
_SAMPLES: Final = Path("assets/pictures")

Distances = NDArray[np.float64]
Kind = tuple[str, Sequence[Pixels]]  # a name, and pictures uint8 (224, 224, 3)


def all_kinds(*, num_own: int, num_others: int, folders: Sequence[Path]) -> Iterator[Kind]:
    """Fresh pictures of the world first, then samples, drawings of other kinds, and pictures in folders."""
    yield "of the world", draw_own(use=FRESH, count=num_own)
    yield "of the world, with a never-drawn pair", draw_own(use=FRESH, count=num_own, never_drawn="with")
    if _SAMPLES.is_dir():
        yield "samples", read_folder(_SAMPLES)
    for kind in KINDS:
        yield f"drawn: {kind}", draw_others(kind, count=num_others, seed=(FAMILIAR_SEED, OTHERS))
    for folder in folders:
        yield f"folder: {folder.name}", read_folder(folder)


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
    """The share of each kind that is called unfamiliar, in floats and in 8 bits, and the AUROC against the first kind.

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
    return {"heads": list(HEADS), "rows": rows}


def share_above(distances_B: Distances, ood_detector: OodDetector) -> float:
    """Percent of pictures beyond the threshold; distances that are not finite count as beyond it."""
    return round(100 * float((~(distances_B <= ood_detector.threshold)).mean()), 1)


def area_under_curve(others_B: Distances, own_B: Distances) -> float:
    """AUROC: how often a picture of another kind is farther away than a picture of the world; ties count half."""
    sorted_B = np.sort(own_B)
    below, upto = (np.searchsorted(sorted_B, others_B, side=side) for side in ("left", "right"))
    return float((below + upto).mean() / 2 / len(own_B))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; `--json` also writes all figures to a file."""
    parser = parser_of(__doc__)
    parser.add_argument("--bundle", type=Path, default=Path("assets/embedded"), help="default: %(default)s")
    parser.add_argument("--pictures", type=int, default=1000, help="fresh pictures of the world (default: %(default)s)")
    parser.add_argument("--drawn", type=int, default=100, help="drawings of each other kind (default: %(default)s)")
    parser.add_argument("--others", type=Path, metavar="FOLDER", action="append", default=[], help="more pictures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    options = parser.parse_args(arguments)
    kinds = all_kinds(num_own=options.pictures, num_others=options.drawn, folders=options.others)
    result = score(options.bundle, kinds)
    print(table(result["heads"], result["rows"]))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
