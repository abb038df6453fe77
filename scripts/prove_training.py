"""Trains the embedded model on data that it does not know, and writes docs/training-proofs.json and .md.

Usage: python -m scripts.prove_training [--part baselines ...] [--work FOLDER] [--out FOLDER] [--quick]

Other parts keep their figures. Needs `pip install --editable '.[bench]'`.
"""

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_adapter.app.models.resources import embedded_model
from scripts.common import Measure, run_bench
from scripts.training_proofs.baselines import accuracies, inputs_of
from scripts.training_proofs.digits import divide, load_scans


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is measured, and where."""

    work: Path
    sizes: tuple[int, ...] = (10, 50, 100)  # training scans a digit
    seeds: int = 5


def measure_baselines(settings: Settings) -> dict[str, Any]:
    scans = load_scans()
    parts = divide(scans.digits_N, seed=0)
    rows = accuracies(scans, inputs_of(scans, embedded_model()), sizes=settings.sizes, seeds=range(settings.seeds))
    return {
        "num_train": len(parts.train),
        "num_validation": len(parts.validation),
        "num_held_out": len(parts.held_out),
        "sizes": settings.sizes,
        "seeds": settings.seeds,
        "rows": rows,
    }


PARTS: dict[str, Measure] = {"baselines": measure_baselines}


def main(arguments: Sequence[str] | None = None) -> None:
    flags = {"work": "working folder, kept afterwards", "seeds": "seeds of the baselines"}
    with tempfile.TemporaryDirectory(prefix="llama-adapter-training-", ignore_cleanup_errors=True) as work:
        full = Settings(work=Path(work))
        quick = dataclasses.replace(full, sizes=(10,), seeds=1)
        run_bench(
            __doc__,
            arguments,
            measure=PARTS,
            page="training-proofs",
            packages=("scikit-learn",),
            full=full,
            quick=quick,
            flags=flags,
        )


if __name__ == "__main__":
    main()
