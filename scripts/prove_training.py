"""Trains the embedded model on data that it does not know, and writes docs/training-proofs.json and .md.

Usage: python -m scripts.prove_training [--part world|bases ...] [--work FOLDER] [--out FOLDER] [--quick]

Parts that are not run keep their figures. Finished results in the working folder are reused. Each part takes
about a quarter of an hour on one core. `bases` needs SmolLM2-135M-Instruct, which `make .venv/smollm2` fetches.
"""

import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.resources import embedded_model
from scripts.bench import Measure, run_bench
from scripts.common import SMOLLM2
from scripts.train_embedded.score import Exam, answer_all, draw_exam, grade, in_other_words, wrong
from scripts.training_proofs.bases import LEVELS, QUESTION, first_steps, write_colors, write_start
from scripts.training_proofs.commands import Training, bundle_of, evaluate, train
from scripts.training_proofs.new_questions import write_drawings

PAGE = "training-proofs"
# New tasks, each with the highest learning rate of its training; None is the default.
NEW: tuple[tuple[str, float | None], ...] = (("corners", None), ("corners", 0.003), ("warm", 0.003))
# Decoders of the part `bases`, each with the highest learning rates of its trainings; None is the default.
BASES: Mapping[str, tuple[Path, tuple[float | None, ...]]] = {
    "the embedded decoder": (embedded_model(), (None, 0.003)),
    "SmolLM2-135M-Instruct": (SMOLLM2, (0.003,)),
}
EXAM_SEED = 22  # for drawings not used elsewhere


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is measured, and where."""

    work: Annotated[Path, "working folder, kept afterwards"]
    drawings: tuple[int, int, int] = (400, 100, 500)  # to train, to validate, to test
    old_drawings: int = 200  # drawings that the old questions are asked about
    colors: tuple[int, int, int] = (400, 40, 200)  # drawings of the part `bases`
    steps: float = 1.0  # share of the steps of each training that is run


def measure_world(settings: Settings) -> dict[str, Any]:
    """Train new questions about drawings of the model's world, with and without old questions mixed in."""
    rows: list[dict[str, Any]] = []
    before = old_scores(embedded_model(), num_pictures=settings.old_drawings)
    for task, rate in NEW:
        data = settings.work / task
        write_drawings(data, task, counts=settings.drawings, seed=0)
        asked = data / "new.jsonl"
        start = evaluate(None, asked, settings.work / f"{task}-before", task="open")
        if task not in {row["task"] for row in rows}:
            rows.append({"task": task, "data": None, "rate": None, "new": start, "old": before})
        for table in ("new", "mixed"):
            run = _world_run(settings, task, table, rate=rate)
            figures = train(run, settings.work)
            bundle = bundle_of(run, settings.work)
            scored = evaluate(bundle, asked, settings.work / f"{run.name}-scores", task="open")
            old = old_scores(bundle, num_pictures=settings.old_drawings)
            rows.append({"task": task, "data": table, "rate": rate, "new": scored, "old": old, **figures})
    return {"drawings": settings.drawings, "old_drawings": settings.old_drawings, "rows": rows}


def measure_bases(settings: Settings) -> dict[str, Any]:
    """Run the same trainings over the embedded decoder and over SmolLM2, with new adapters."""
    data = write_colors(settings.work / "colors", counts=settings.colors)
    rows = []
    for base, (llama_dir, rates) in BASES.items():
        short = base.split()[-1]
        start = settings.work / f"start-{short}.pth"
        if not start.exists():
            write_start(llama_dir, start)
        for rate in rates:
            model = ("--llama-dir", str(llama_dir), "--adapter", str(start), "--clip", str(embedded_model()))
            method = ("--sets", "bias,lora", "--batch-size", "8", "--tower-epochs", "0", "--evaluate-every", "15")
            chosen = () if rate is None else ("--lr", str(rate))
            flags = (*model, *method, *chosen, "--patience", "0", *_epochs(settings, 2.4))
            run = Training(name="-".join(("colors", short, *chosen[1:])), data=data, flags=flags)
            figures = train(run, settings.work)
            test = json.loads((settings.work / f"{run.name}.training/test.json").read_text(encoding="utf-8"))["figures"]
            rows.append({"base": base, "rate": rate, "test": test, "reached": first_steps(figures["curve"]), **figures})
    finished = evaluate(None, data, settings.work / "colors-finished", task="open")
    return {"drawings": settings.colors, "question": QUESTION, "levels": LEVELS, "finished": finished, "rows": rows}


def _world_run(settings: Settings, task: str, table: str, *, rate: float | None) -> Training:
    flags = () if rate is None else ("--lr", str(rate), "--patience", "0")
    return Training(
        name="-".join((task, table, *flags[1:2])),
        data=settings.work / task / f"{table}.jsonl",
        # A mixed table has three questions per drawing.
        flags=("--sets", "bias", *flags, *_epochs(settings, 15 if table == "new" else 9)),
    )


def _epochs(settings: Settings, count: float) -> tuple[str, ...]:
    """The flag for `count` epochs, scaled by the settings."""
    return "--epochs", f"{count * settings.steps:.4g}"


def old_scores(bundle: Path, *, num_pictures: int) -> dict[str, dict[str, Any]]:
    """Percent of right answers, by task and for `all`, in known words and in held-out ones, and the number asked."""
    exam = draw_exam(num_pictures=num_pictures, seed=EXAM_SEED)
    with Captioner.load(bundle, device="cpu", dtype="float32") as captioner:
        return {
            "known_words": _shares(captioner, exam),
            "other_words": _shares(captioner, in_other_words(exam, seed=EXAM_SEED)),
        }


def _shares(captioner: Captioner, exam: Exam) -> dict[str, Any]:
    answers = answer_all(captioner, exam)
    right = 1 - len(wrong(answers)) / len(answers)
    return {"asked": len(answers), "all": round(100 * right, 2), **grade(answers)}


PARTS: dict[str, Measure] = {"world": measure_world, "bases": measure_bases}


def main(arguments: Sequence[str] | None = None) -> None:
    with tempfile.TemporaryDirectory(prefix="llama-adapter-training-", ignore_cleanup_errors=True) as work:
        full = Settings(work=Path(work))
        quick = dataclasses.replace(full, drawings=(16, 8, 8), old_drawings=10, colors=(16, 4, 4), steps=0.5)
        run_bench(__doc__, arguments, measure=PARTS, page=PAGE, full=full, quick=quick)


if __name__ == "__main__":
    main()
