"""Trains on small sets of ordinary pictures, beside other methods, and writes docs/own-pictures.json and .md.

Usage: python -m scripts.prove_own_pictures [--part accuracy|stages|examples|calibration ...] [--only SET ...]
                                            [--signs FOLDER] [--work FOLDER] [--out FOLDER] [--quick]

FOLDER of --signs is `Dataset` of the Sign Language Digits Dataset by Turkey Ankara Ayranci Anadolu High School (Apache
License 2.0). Without it, this set is left out. Parts that are not run keep their figures, and finished results in the
working folder are reused. Needs `pip install --editable '.[bench]'`. `python -m scripts.own_pictures.curves` draws the
plot.
"""

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from llama_adapter.app.models.resources import embedded_model
from scripts.bench import Measure, run_bench
from scripts.common import in_fresh_process, tell
from scripts.own_pictures.baselines import accuracies, inputs_of
from scripts.own_pictures.commands import evaluate, remembered
from scripts.own_pictures.runs import decide, train
from scripts.own_pictures.sets import HELD_OUT, PER_CLASS, fewer, read_part, sets_of, write_set
from scripts.own_pictures.small_network import accuracy_after
from scripts.own_pictures.stages import shares_right

PAGE = "own-pictures"
SEED = 11  # of the pictures; no setting was chosen with them
NAMES = ("signs", "digits", "crops", "characters", "tools", "pages")
CALIBRATED = ("signs", "tools", "characters", "crops", "pages", "digits")  # the first three of them that are measured
NUM_CALIBRATED = 3
PROMISE = 0.95
NETWORK = "small network"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is measured, and where."""

    work: Annotated[Path, "working folder, kept afterwards"]
    signs: Annotated[Path, "folder of photographs of hand signs, by class"] = Path("signs")
    only: Annotated[tuple[str, ...], "sets of the measured parts"] = NAMES
    threads: Annotated[int, "threads of a training"] = 2
    learned: int = PER_CLASS - HELD_OUT  # pictures of each class
    held_out: int = HELD_OUT
    fewer: tuple[int, ...] = (10, 4, 1)  # learned pictures of each class in the part `examples`, besides `learned`
    splits: int = 5  # of the held-out pictures
    flags: tuple[str, ...] = ()  # of each training


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One set with a number of learned pictures of each class: the folders and the adapter."""

    settings: Settings
    name: str  # of the set
    learned: int

    @property
    def folder(self) -> Path:
        """The pictures: learn/CLASS and held/CLASS."""
        return self.settings.work / f"{self.name}-{self.settings.learned}-{self.settings.held_out}"

    @property
    def out(self) -> Path:
        return self.settings.work / f"{self.folder.name}-{self.learned}.pth"

    @property
    def bundle(self) -> Path:
        return self.out.with_suffix(".training") / "bundle"

    def train(self) -> dict[str, Any]:
        """The figures of the training."""
        learn = self.folder / "learn"
        if self.learned < self.settings.learned:
            learn = fewer(learn, self.learned)
        # The only picture of a class cannot be held out.
        nothing_held_out = ("--validation", "0", "--test", "0") if self.learned == 1 else ()
        return train(learn, self.out, flags=(*self.settings.flags, *nothing_held_out), threads=self.settings.threads)

    def scores(self, task: Any) -> dict[str, dict[str, float]]:
        """The figures of `eval` on the held-out pictures."""
        return evaluate(self.bundle, self.folder / "held", self.scores_folder(task), task=task)

    def scores_folder(self, task: str) -> Path:
        return self.settings.work / f"{self.out.stem}-{task}"


def _runs(settings: Settings) -> Iterator[Run]:
    """The sets, each written as folders, with all its learned pictures."""
    has_signs = settings.signs.is_dir()
    if "signs" in settings.only and not has_signs:
        tell(f"the set `signs` is left out: there is no folder `{settings.signs}`; name it as --signs")
    settings.work.mkdir(parents=True, exist_ok=True)
    for name, make in sets_of(settings.signs if has_signs else None).items():
        if name in settings.only:
            run = Run(settings=settings, name=name, learned=settings.learned)
            draw = partial(make, SEED, settings.learned + settings.held_out)
            write_set(run.folder, draw, held_out=settings.held_out)
            yield run


def measure_accuracy(settings: Settings) -> dict[str, Any]:
    """Each set by `train`, by the baselines, and by a network from scratch in the same seconds."""
    rows = []
    for run in _runs(settings):
        trained = run.train()
        network = partial(_network_accuracy, run, seconds=trained["seconds"])
        rows.append(
            {
                "set": run.name,
                **trained,
                "choices": run.scores("choices")["accuracy"],
                "open": run.scores("open")["exact"],
                "baselines": _probes(run) | remembered(run.folder.with_suffix(".network.json"), network),
            }
        )
    return {**_counts(settings), "rows": rows}


def measure_stages(settings: Settings) -> dict[str, Any]:
    """The stages of each set's training, and the network in the same seconds from as many pictures."""
    rows = []
    for run in _runs(settings):
        trained = run.train()
        held = read_part(run.folder / "held")
        learned = trained["num_trained"] // len(held.classes)
        network = partial(_network_accuracy, run, seconds=trained["seconds"], learned=learned)
        rows.append(
            {
                "set": run.name,
                "per_class": learned,
                "stages": remembered(
                    run.out.with_suffix(".stages.json"), partial(shares_right, run.bundle.parent, held)
                ),
                "choices": run.scores("choices")["accuracy"]["value"],
                **remembered(run.out.with_suffix(".network.json"), network),
            }
        )
    return {**_counts(settings), "rows": rows}


def measure_examples(settings: Settings) -> dict[str, Any]:
    """Each set with fewer and fewer learned pictures, by `train` and by the baselines in closed form."""
    rows = []
    for whole in _runs(settings):
        for learned in (settings.learned, *settings.fewer):
            run = dataclasses.replace(whole, learned=learned)
            trained = run.train()
            choices = run.scores("choices")["accuracy"]
            rows.append(
                {"set": run.name, "per_class": learned, **trained, "choices": choices, "baselines": _probes(run)}
            )
    return {**_counts(settings), "rows": rows}


def measure_calibration(settings: Settings) -> dict[str, Any]:
    """Decisions with a promised share of right ones, calibrated on halves of the held-out pictures."""
    rows = []
    for run in sorted(_runs(settings), key=lambda run: CALIBRATED.index(run.name))[:NUM_CALIBRATED]:
        run.train()
        accuracy = run.scores("choices")["accuracy"]
        answers = run.scores_folder("choices") / "answers.jsonl"
        outs = [settings.work / f"{run.out.stem}-split-{seed}" for seed in range(settings.splits)]
        splits = [decide(run.bundle, answers, out, target=PROMISE, seed=seed) for seed, out in enumerate(outs)]
        rows.append({"set": run.name, "accuracy": accuracy["value"], "splits": splits})
    return {"promise": PROMISE, "rows": rows}


def _counts(settings: Settings) -> dict[str, int]:
    return {"threads": settings.threads, "learned": settings.learned, "held_out": settings.held_out}


def _probes(run: Run) -> dict[str, float]:
    """Accuracies of the baselines that learn the first pictures of each class."""

    def measure() -> dict[str, float]:
        learn, held = (read_part(run.folder / part) for part in ("learn", "held"))
        first_N = np.arange(len(learn.labels_N)) % run.settings.learned < run.learned
        learn_inputs, held_inputs = (inputs_of(part.pictures, embedded_model()) for part in (learn, held))
        learned = {name: input_NF[first_N] for name, input_NF in learn_inputs.items()}
        return accuracies(learned, learn.labels_N[first_N], held_inputs, held.labels_N)

    return remembered(run.out.with_suffix(".probes.json"), measure)


def _network_accuracy(run: Run, *, seconds: float, learned: int | None = None) -> dict[str, float]:
    """The accuracy of the small network that learns all pictures, or a number of each class."""
    learn_folder = run.folder / "learn" if learned is None else fewer(run.folder / "learn", learned)
    learn, held = (read_part(folder) for folder in (learn_folder, run.folder / "held"))
    return {NETWORK: in_fresh_process(partial(accuracy_after, threads=run.settings.threads), seconds, learn, held)}


PARTS: dict[str, Measure] = {
    "accuracy": measure_accuracy,
    "stages": measure_stages,
    "examples": measure_examples,
    "calibration": measure_calibration,
}


def main(arguments: Sequence[str] | None = None) -> None:
    with tempfile.TemporaryDirectory(prefix="llama-adapter-own-pictures-", ignore_cleanup_errors=True) as work:
        full = Settings(work=Path(work))
        small = dataclasses.replace(full, learned=4, held_out=2, fewer=(1,), splits=1)
        quick = dataclasses.replace(small, only=("pages",), flags=("--epochs", "0.5"))
        packages = ("scikit-image", "scikit-learn")
        choices = {"only": NAMES}
        run_bench(
            __doc__, arguments, measure=PARTS, page=PAGE, packages=packages, full=full, quick=quick, choices=choices
        )


if __name__ == "__main__":
    main()
