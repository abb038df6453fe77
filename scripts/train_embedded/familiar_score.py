"""Scores what a bundle says of familiar and unfamiliar pictures: false alarms on its own world, hits on others."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.app.models.out_of_distribution import OodDetector
from llama_adapter.app.models.spec import Precision
from llama_adapter.app.terminal.run_guarded import run_guarded
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.formats import PICTURE_SUFFIXES
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.preprocess import preprocess
from scripts.train_embedded.familiar import FRESH, OTHERS, PRECISIONS, Encode, draw_own, encoder_of
from scripts.train_embedded.other_worlds import KINDS, draw_others
from scripts.train_embedded.pictures import FAMILIAR_SEED
from scripts.train_embedded.render import Pixels

HEADS: Final = ("pictures", "number", "called unfamiliar, float (%)", "AUROC, float", "called unfamiliar, int8 (%)")
_OWN: Final = "of the world"
_SAMPLES: Final = Path("assets/pictures")

Distances = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Pictures of one kind, uint8 (224, 224, 3) each."""

    name: str
    pictures: Sequence[Pixels]


def all_kinds(*, num_own: int, num_others: int, folders: Sequence[Path]) -> Iterator[Kind]:
    """Fresh pictures of the world first, then the samples, what is drawn of other worlds, and pictures in folders."""
    yield Kind(name=_OWN, pictures=draw_own(use=FRESH, count=num_own))
    yield Kind(
        name="of the world, with a never-drawn pair", pictures=draw_own(use=FRESH, count=num_own, never_drawn="with")
    )
    if _SAMPLES.is_dir():
        yield Kind(name="samples", pictures=read_folder(_SAMPLES))
    for kind in KINDS:
        pictures = draw_others(kind, count=num_others, seed=(FAMILIAR_SEED, OTHERS))
        yield Kind(name=f"drawn: {kind}", pictures=pictures)
    for folder in folders:
        yield Kind(name=f"folder: {folder.name}", pictures=read_folder(folder))


def read_folder(folder: Path) -> list[Pixels]:
    """The pictures in a folder, as the product reads them, by name. Raises ValueError where there is none.

    What cannot be read is told on stderr and left out.
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
    """Shares of each kind that are called unfamiliar, in floats and in 8 bits, and the AUROC against the first kind.

    Raises CheckpointError for a bundle that cannot tell.
    """
    ood_detector = load_bundle(bundle).ood_detector
    if ood_detector is None:
        raise CheckpointError(
            f"The bundle `{bundle}` cannot tell unfamiliar pictures",
            hint="fit it first: `python -m scripts.train_embedded.familiar --bundle BUNDLE`",
        )
    encoders: dict[Precision, Encode] = {each: encoder_of(bundle, precision=each) for each in PRECISIONS}
    rows: list[list[object]] = []
    own: Distances | None = None
    for kind in kinds:
        found = {each: ood_detector.distances(encode(kind.pictures)) for each, encode in encoders.items()}
        own = found["float"] if own is None else own
        rows.append(
            [
                kind.name,
                len(kind.pictures),
                share_above(found["float"], ood_detector),
                round(area_under_curve(found["float"], own), 3),
                share_above(found["int8"], ood_detector),
            ]
        )
    return {"heads": list(HEADS), "rows": rows}


def share_above(distances_B: Distances, ood_detector: OodDetector) -> float:
    """Percent of pictures beyond the threshold, as the product tells: numbers that are not finite are."""
    return round(100 * float((~(distances_B <= ood_detector.threshold)).mean()), 1)


def area_under_curve(others_B: Distances, own_B: Distances) -> float:
    """AUROC: how often a picture of the one kind lies farther off than one of the other; equal ones count half."""
    sorted_B = np.sort(own_B)
    below, upto = (np.searchsorted(sorted_B, others_B, side=side) for side in ("left", "right"))
    return float((below + upto).mean() / 2 / len(own_B))


def table(result: dict[str, Any]) -> str:
    """The figures as a Markdown table."""
    rows = [result["heads"], ["---"] * len(result["heads"]), *result["rows"]]
    return "\n".join(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: the table on stdout, JSON in a file if wanted."""
    parser = argparse.ArgumentParser(prog="python -m scripts.train_embedded.familiar_score", description=__doc__)
    parser.add_argument("--bundle", type=Path, default=Path("assets/embedded"), help="default: %(default)s")
    parser.add_argument("--pictures", type=int, default=1000, help="of the world, fresh (default: %(default)s)")
    parser.add_argument("--drawn", type=int, default=100, help="of each other world (default: %(default)s)")
    parser.add_argument(
        "--others",
        type=Path,
        metavar="FOLDER",
        action="append",
        default=[],
        help="pictures of your own; may be repeated",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    options = parser.parse_args(arguments)
    kinds = all_kinds(num_own=options.pictures, num_others=options.drawn, folders=options.others)
    result = score(options.bundle, kinds)
    print(table(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
