"""Scores the embedded model, or another bundle like it, and writes docs/embedded-model.json and docs/embedded-model.md.

Usage: python -m scripts.train_embedded.card [--part scores|familiar|training ...] [--model BUNDLE] [--pictures N]
                                             [--seed N] [--others FOLDER ...] [--run FOLDER] [--out FOLDER] [--quick]

Parts that are not measured keep their figures. `scores` asks questions about fresh pictures, in float32 and in int8.
`familiar` shows the model pictures of other kinds. `training` takes the curves of a training, and plots them as
embedded-curves.png.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle
from scripts.bench import Measure, parse_settings, run_bench
from scripts.common import ROOT, tell
from scripts.train_embedded import familiar_score
from scripts.train_embedded.curves import collect, draw
from scripts.train_embedded.score import score

PAGE = "embedded-model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is measured, and how much."""

    model: Annotated[Path, "bundle to score"] = ROOT / "assets/embedded"
    pictures: Annotated[int, "fresh pictures of each table of scores"] = 500
    seed: Annotated[int, "seed of these pictures"] = 2
    own: int = 1000  # fresh pictures of the world, for the detection of other pictures
    drawn: int = 100  # drawings of each other kind
    others: Annotated[tuple[Path, ...], "folders of more pictures"] = (ROOT / "assets/pictures",)
    run: Annotated[Path, "folder of a training, with its NAME.curve.jsonl"] = Path(".work/embedded/run")


def measure_scores(settings: Settings) -> dict[str, Any]:
    """The tables of scores of the bundle, in float32 and with weights of 8 bits."""
    with tempfile.TemporaryDirectory() as folder:
        quantised = quantise_bundle(QuantiseJob(model=str(settings.model), out=f"{folder}/int8"))
        found = {}
        for name, bundle in (("float32", settings.model), ("int8", quantised)):
            found[name] = score(bundle, num_pictures=settings.pictures, seed=settings.seed)
            tell(f"{name}: {found[name]['scores']}, {found[name]['num_wrong']} wrong")
            for fault in found[name]["wrong_examples"][:8]:
                tell(f"wrong: {fault['question']} -> {fault['got']!r}, wanted {fault['wanted']!r}")
    return found


def measure_familiar(settings: Settings) -> dict[str, Any]:
    """False alarms of the bundle on pictures of its world, and hits on other pictures."""
    kinds = familiar_score.all_kinds(num_own=settings.own, num_others=settings.drawn, folders=settings.others)
    found = familiar_score.score(settings.model, kinds)
    for row in found["rows"]:
        tell(", ".join(map(str, row)))
    return found


MEASURES: Mapping[str, Measure] = {
    "scores": measure_scores,
    "familiar": measure_familiar,
    "training": lambda settings: collect(settings.run),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write. The exit code is 2 for invalid flags and for a folder without curves, before measurements."""
    options: dict[str, Any] = {"page": PAGE, "full": Settings(), "quick": Settings(pictures=2, own=4, drawn=1)}
    settings, folder, parts = parse_settings(__doc__, arguments, parts=MEASURES, **options)
    if "training" in parts:
        try:
            collect(settings.run)
        except ValueError as error:
            tell(f"error: {error}, or choose other parts with --part")
            raise SystemExit(2) from None
    found = run_bench(__doc__, arguments, measure=MEASURES, **options)
    if folder is not None and "training" in found:
        draw(found["training"]["curves"], folder / "embedded-curves.png")


if __name__ == "__main__":
    main()
