"""Measures the effect of 8-bit weights on the embedded model, and writes docs/int8.json and docs/int8.md.

Usage: python -m scripts.int8_report [--pictures N] [--outliers SIZE]
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_adapter.app.measuring.report import circumstances, load_average
from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.vision.image import PictureSource
from scripts.common import parser_of, sample_files, tell
from scripts.int8_measures import measure_variants, outlier_error, require_kernels
from scripts.pages.render import save
from scripts.train_embedded.score import draw_exam

_SEED = 3  # of the exams; no other page uses these pictures


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write. Raises DeviceError on a machine without 8-bit kernels."""
    parser = parser_of(__doc__)
    parser.add_argument("--pictures", type=int, default=500, help="fresh pictures of each kind (default: %(default)s)")
    parser.add_argument("--outliers", default="160M", help="random decoder to plant them in (default: %(default)s)")
    options = parser.parse_args(arguments)
    save("int8", measure(num_pictures=options.pictures, outliers=options.outliers))
    return 0


def measure(*, num_pictures: int, outliers: str) -> dict[str, Any]:
    """All figures as JSON values."""
    require_kernels()
    load_before = load_average()
    exams = {
        "plain": draw_exam(num_pictures=num_pictures, seed=_SEED),
        "never_drawn_pairs": draw_exam(num_pictures=num_pictures, seed=_SEED, never_drawn="with"),
    }
    pictures: dict[str, Sequence[PictureSource]] = {
        "samples": list(map(str, sample_files())),
        "drawings": exams["plain"].pictures,
        "pairs": exams["never_drawn_pairs"].pictures,
    }
    variants = measure_variants(pictures, exams, tell=tell)
    return {
        "pictures": {name: len(files) for name, files in pictures.items()},
        "asked": {name: len(exam.questions) for name, exam in exams.items()},
        "variants": variants,
        "bytes": _bundle_bytes(),
        "outliers": {"size": outliers, **outlier_error(outliers)},
        "circumstances": circumstances(load_before=load_before),
    }


def _bundle_bytes() -> dict[str, int]:
    with tempfile.TemporaryDirectory() as scratch:
        made = quantise_bundle(QuantiseJob(out=str(Path(scratch) / "bundle")))
        return {
            name: sum(file.stat().st_size for file in place.glob("*.safetensors"))
            for name, place in (("float16", embedded_model()), ("int8", made))
        }


if __name__ == "__main__":
    sys.exit(main())
