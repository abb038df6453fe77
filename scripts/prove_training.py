"""Trains the embedded model on data that it does not know, and writes docs/training-proofs.json and .md.

Usage: python -m scripts.prove_training [--part baselines|digits|world|precision ...] [--work FOLDER] [--out FOLDER]
                                        [--quick]

Parts that are not run keep their figures. Finished results in the working folder are reused. Needs
`pip install --editable '.[bench]'`. All parts together take about an hour on one core.
"""

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.command_line.measuring import scoring
from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.app.models.resources import embedded_model
from scripts.bench import Measure, run_bench
from scripts.train_embedded.score import ALL_TASKS, Exam, answer_all, draw_exam, in_other_words
from scripts.training_proofs.baselines import accuracies, inputs_of
from scripts.training_proofs.commands import Training, bundle_of, evaluate, train
from scripts.training_proofs.digits import CHOICES, KNOWN_WORDS, divide, load_scans, write_digits
from scripts.training_proofs.new_questions import write_drawings

PAGE = "training-proofs"
# New tasks, each with the highest learning rate of its training; None is the default.
NEW: tuple[tuple[str, float | None], ...] = (("corners", None), ("corners", 0.003), ("warm", 0.003))
PRECISION = "corners"  # the task of the part `precision`
EPOCHS = 6  # of the shortest trainings on all scans; with fewer scans, more epochs for the same number of steps
LONGER = 4
EXAM_SEED = 22  # for drawings not used elsewhere
BEFORE_ANSWER = "### Response:"  # the text before an answer in the prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is measured, and where."""

    work: Annotated[Path, "working folder, kept afterwards"]
    sizes: tuple[int, ...] = (10, 50, 100)  # training scans per digit
    seeds: Annotated[int, "seeds of the baselines"] = 5
    drawings: tuple[int, int, int] = (400, 100, 500)  # to train, to validate, to test
    old_drawings: int = 200  # drawings that the old questions are asked about
    steps: float = 1.0  # share of the steps of each training that is run


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


def measure_digits(settings: Settings) -> dict[str, Any]:
    """Train on scans, with answers that name the digits, and with words that the model already says."""
    scans, data = load_scans(), settings.work / "digits"
    write_digits(data, scans, divide(scans.digits_N, seed=0), sizes=settings.sizes)
    rows = []
    most = settings.sizes[-1]
    for answers, size, sets, length in _digit_runs(settings.sizes):
        flags = ("--sets", sets, *_epochs(settings, EPOCHS * length * most / size))
        name = f"{answers}-{size}-{sets.replace(',', '-')}{f'-{length}x' if length > 1 else ''}"
        run = Training(name=name, data=data / f"{answers}-{size}.jsonl", flags=flags)
        figures = train(run, settings.work)
        scored = {
            task: evaluate(bundle_of(run, settings.work), run.data, settings.work / f"{name}-{task}", task=task)
            for task in ("choices", "open")
        }
        rows.append({"answers": answers, "per_digit": size, "sets": sets, "length": length, **figures, **scored})
    likeness = {
        "digits": head_likeness(embedded_model(), CHOICES),
        "words": head_likeness(embedded_model(), KNOWN_WORDS),
    }
    return {"likeness": likeness, "rows": rows}


def _digit_runs(sizes: Sequence[int]) -> Iterator[tuple[str, int, str, int]]:
    """Yields the answers, the scans per digit, the trained sets, and the length relative to the shortest run."""
    most = sizes[-1]
    for sets in ("bias", "bias,lora"):
        for size in reversed(sizes):
            yield "digits", size, sets, LONGER
    yield "digits", most, "lora", LONGER
    for size in reversed(sizes):
        yield "digits", size, "lora", 1
    yield "digits", most, "bias", 1
    yield "digits", most, "lora,visual", 1
    for sets in ("bias", "lora", "lora,visual"):
        yield "words", most, sets, 1


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


def measure_precision(settings: Settings) -> dict[str, Any]:
    """Run the same training with frozen weights in float32 and in bfloat16."""
    data = settings.work / PRECISION
    write_drawings(data, PRECISION, counts=settings.drawings, seed=0)
    rows = []
    for dtype in ("float32", "bfloat16"):
        run = _world_run(settings, PRECISION, "new")
        if dtype != "float32":
            run = dataclasses.replace(run, name=f"{run.name}-{dtype}", flags=(*run.flags, "--dtype", dtype))
        figures = train(run, settings.work)
        scored = evaluate(bundle_of(run, settings.work), run.data, settings.work / f"{run.name}-scores", task="open")
        rows.append({"dtype": dtype, "new": scored, **figures})
    return {"task": PRECISION, "rows": rows}


def _world_run(settings: Settings, task: str, table: str, *, rate: float | None = None) -> Training:
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


def head_likeness(bundle: Path, answers: Sequence[str]) -> float:
    """Mean cosine between the head's rows for the first tokens of two different answers."""
    model = load_bundle(bundle)
    tokens = [model.tokenizer.encode_continuation(BEFORE_ANSWER, answer)[0] for answer in answers]
    rows_AD = torch.nn.functional.normalize(model.decoder_state["head.weight"][tokens].float(), dim=1)
    cosine_AA = rows_AD @ rows_AD.T
    count = len(answers)
    return float((cosine_AA.sum() - count) / (count * (count - 1)))


def old_scores(bundle: Path, *, num_pictures: int) -> dict[str, dict[str, Any]]:
    """Percent of right answers, by task and for `all`, in known words and in held-out ones, and the number asked."""
    exam = draw_exam(num_pictures=num_pictures, seed=EXAM_SEED)
    with Captioner.load(bundle, device="cpu", dtype="float32") as captioner:
        return {
            "known_words": _shares(captioner, exam),
            "other_words": _shares(captioner, in_other_words(exam, seed=EXAM_SEED)),
        }


def _shares(captioner: Captioner, exam: Exam) -> dict[str, Any]:
    asked = [question for _, question in exam.questions]
    marks = scoring.grade(asked, answer_all(captioner, exam))
    right = {task: 100 * marks[task].right / marks[task].asked for task in ALL_TASKS if task in marks}
    total = sum(mark.right for mark in marks.values())
    return {"asked": len(asked), "all": round(100 * total / len(asked), 2)} | {
        task: round(share, 2) for task, share in right.items()
    }


PARTS: dict[str, Measure] = {
    "baselines": measure_baselines,
    "digits": measure_digits,
    "world": measure_world,
    "precision": measure_precision,
}


def main(arguments: Sequence[str] | None = None) -> None:
    with tempfile.TemporaryDirectory(prefix="llama-adapter-training-", ignore_cleanup_errors=True) as work:
        full = Settings(work=Path(work))
        quick = dataclasses.replace(full, sizes=(10,), seeds=1, drawings=(16, 8, 8), old_drawings=10, steps=0.05)
        packages = ("scikit-learn",)
        run_bench(__doc__, arguments, measure=PARTS, page=PAGE, packages=packages, full=full, quick=quick)


if __name__ == "__main__":
    main()
