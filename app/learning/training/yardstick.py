"""What simple methods reach on the data of a run, in seconds: the yardstick for the trained adapter.

Examples with choices are classified from small grey pixels and from the encoder's features (`probes.py`). For captions
and open answers, one answer is given to all examples. N examples, D numbers of a vector, C width of the features, S
pixels a side.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llama_adapter.app.captioning.decisions.measures import NUM_FOLDS, wilson_low
from llama_adapter.app.learning.scores.answers import answer_scores
from llama_adapter.app.learning.scores.intervals import Figure
from llama_adapter.app.learning.scores.outcome import Outcome, Task, task_of
from llama_adapter.app.learning.scores.scoring import measure_outcomes
from llama_adapter.app.learning.training.asking import TrainExample
from llama_adapter.app.learning.training.batches import Encodings
from llama_adapter.app.learning.training.model import TrainableModel
from llama_adapter.app.learning.training.prepare import TrainingData
from llama_adapter.app.learning.training.probes import (
    grey_pixels,
    linear_classes,
    nearest_classes,
    standardised,
    stratified_folds,
)
from llama_adapter.app.learning.training.scoring import HEADLINES, SHOWN
from llama_adapter.runtime.text import shown_excerpt

MOST_MEASURED: Final = 2000  # of more examples, a sample is measured
_TOGETHER: Final = 64
GREY, FEATURES = "small grey pixels", "the encoder's features"
_ADVICE: Final = (
    "Try, in this order: more --epochs; --sets bias,vision; more examples. Then look for examples with a wrong answer."
)

Vectors = NDArray[np.floating]


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A simple classifier, and the share of examples that it answers right in cross-validation."""

    method: str
    on: str  # what it sees: `GREY` or `FEATURES`
    figure: Figure  # with Wilson's interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Yardstick:
    """What simple methods reach: of the training examples if they have choices, otherwise of the test examples."""

    task: Task
    answer: str  # the most frequent right answer of the training examples
    constant: Figure  # what this answer reaches if it is given to all examples; for shares, with Wilson's interval
    exact: float | None = None  # without choices: the share of examples for which it is right to the letter
    probes: tuple[Probe, ...] = ()  # only for examples with choices

    @property
    def rows(self) -> tuple[tuple[str, Figure], ...]:
        """Name and figure of each method, the constant answer first."""
        constant = (f"always “{shown_excerpt(self.answer, length=60)}”", self.constant)
        return (constant, *((f"a {one.method} on {one.on}", one.figure) for one in self.probes))

    def lines(self) -> list[str]:
        """All figures, in at most four lines for a terminal."""
        part = "training" if self.task == "choices" else "test"
        way = f", {NUM_FOLDS}-fold cross-validation (95 % interval)" if self.probes else ""
        exact = "" if self.exact is None else f", to the letter {_share(self.exact)}"
        lines = [
            f"yardstick: {SHOWN[self.task]} on {self.constant.count:,} {part} examples{way}",
            f"  {self.rows[0][0]} {self._shown(self.constant)}{exact}",
        ]
        for on in dict.fromkeys(one.on for one in self.probes):
            figures = [(one.method, one.figure) for one in self.probes if one.on == on]
            found = (
                f"{method} {_share(one.value)} ({_share(one.low)} to {_share(one.high)})" for method, one in figures
            )
            lines.append(f"  {on}: {', '.join(found)}")
        return lines

    def verdict(self, score: Figure) -> str | None:
        """A sentence on an adapter that is not better than simple methods, with what to try; otherwise None.

        `score` is the adapter's figure `HEADLINES[task]` on the test examples. The result is None if it is at least as
        high as that of the best method, or if its 95 % interval is above chance and includes the best method. Chance is
        what one answer for all examples reaches. The interval of shares is Wilson's. None with fewer than two examples.
        """
        value, chance = score.value, self.constant.value or 0.0
        name, best = max(self.rows, key=lambda row: row[1].value or 0.0)
        if value is None or score.count < 2 or value >= (best.value or 0.0):
            return None
        own = score if self.task == "captions" else _figure(round(value * score.count), score.count)
        low, high = (value if end is None else end for end in (own.low, own.high))
        is_near_chance = low <= chance
        if not is_near_chance and high >= (best.value or 0.0):
            return None
        floor = "chance" if self.task == "choices" else "one answer for all"
        judged = f"not clearly above {floor}" if is_near_chance else "below a simple method"
        others = dict(self.rows[:1] if is_near_chance else ()) | {name: best}
        reached = f"{SHOWN[self.task]} {self._shown(score)} on {score.count:,} test examples"
        others_shown = ", ".join(f"{name} {self._shown(figure)}" for name, figure in others.items())
        return f"the adapter is {judged}: {reached}; {others_shown}. {_ADVICE}"

    def _shown(self, figure: Figure) -> str:
        return f"{figure.value or 0.0:.3f}" if self.task == "captions" else _share(figure.value)


def _share(value: float | None) -> str:
    return f"{100 * (value or 0.0):.1f} %"


def _figure(num_right: int, count: int) -> Figure:
    """The share of right answers with Wilson's 95 % interval."""
    low, high = wilson_low(num_right, count), 1.0 - wilson_low(count - num_right, count)
    return Figure(value=num_right / count, low=low, high=high, count=count)


def measure_choices(
    answers: Sequence[str],
    pictures: Sequence[str],
    *,
    grey_ND: Vectors | None = None,
    features_ND: Vectors | None = None,
) -> Yardstick:
    """What simple methods reach on training examples with choices, at least one.

    `answers` are the right answers, and `pictures` name the pictures: examples with the same name are in one fold.
    `grey_ND` has `grey_pixels` of each example, `features_ND` the mean of the encoder's tokens; numbers that are not
    finite count as 0. Without vectors, or with a single picture, there are no probes.
    """
    names, labels_N = np.unique(answers, return_inverse=True)
    fold_N = stratified_folds(labels_N, pictures, seed=0)
    probes = []
    for on, given_ND in ((GREY, grey_ND), (FEATURES, features_ND)):
        if given_ND is None or not fold_N.any():
            continue
        own_ND = np.nan_to_num(given_ND.astype(np.float64), posinf=0.0, neginf=0.0)
        near_N = nearest_classes(own_ND, labels_N, fold_N, by_angle=on == FEATURES)
        linear_N = linear_classes(standardised(own_ND) if on == FEATURES else own_ND, labels_N, fold_N)
        for method, found_N in (("nearest-neighbour probe", near_N), ("linear probe", linear_N)):
            figure = _figure(int((found_N == labels_N).sum()), len(labels_N))
            probes.append(Probe(method=method, on=on, figure=figure))
    counts = np.bincount(labels_N)
    constant = _figure(int(counts.max()), len(labels_N))
    return Yardstick(task="choices", answer=str(names[counts.argmax()]), constant=constant, probes=tuple(probes))


def measure_answers(learned: Iterable[Sequence[str]], asked: Sequence[Sequence[str]]) -> Yardstick:
    """What the most frequent right answer of the training examples reaches on the test examples.

    `learned` and `asked` are the right answers of each training and test example. The test examples determine whether
    they are captions or open answers, as they do when an adapter is scored. Raises UsageError without test examples.
    """
    counts = Counter(answer for answers in learned for answer in dict.fromkeys(answers))
    answer = counts.most_common(1)[0][0]
    outcomes = [Outcome(picture="", question="", answer=answer, references=tuple(one)) for one in asked]
    task, count = task_of(outcomes), len(outcomes)
    value = measure_outcomes(task, outcomes).statistics(np.arange(count))[HEADLINES[task]] or 0.0
    constant = Figure(value=value, count=count) if task == "captions" else _figure(round(value * count), count)
    exact = float(answer_scores(outcomes)["exact"].mean())
    return Yardstick(task=task, answer=answer, constant=constant, exact=exact)


def yardstick_of(model: TrainableModel, data: TrainingData, encodings: Encodings) -> Yardstick | None:
    """What simple methods reach on the data before the training; None without test examples that need a constant.

    Small grey pixels are measured if the encodings are pixels, and the encoder's features if they are known.
    """
    chosen = [one for one in data.train if one.example.choices is not None and one.has_picture]
    if 2 * len(chosen) <= len(data.train):
        asked = [one.example.answers for one in data.test if one.example.choices is None]
        return measure_answers([one.example.answers for one in data.train], asked) if asked else None
    if len(chosen) > MOST_MEASURED:
        drawn = np.random.default_rng(0).choice(len(chosen), MOST_MEASURED, replace=False)
        chosen = [chosen[place] for place in np.sort(drawn)]
    grey_ND, features_ND = _vectors(model, chosen, encodings)
    return measure_choices(
        [one.example.answers[0] for one in chosen],
        [one.example.digest for one in chosen],
        grey_ND=grey_ND,
        features_ND=features_ND,
    )


@torch.no_grad()
def _vectors(
    model: TrainableModel, examples: Sequence[TrainExample], encodings: Encodings
) -> tuple[Vectors | None, Vectors | None]:
    """Grey pixels (N, 576) and the mean of CLIP's tokens (N, C) of each example; None if the encodings lack them."""
    if model.encodes not in ("pixels", "features") or model.vision is None:
        return None, None
    grey: list[Vectors] = []
    features: list[Tensor] = []
    for at in range(0, len(examples), _TOGETHER):
        encoded = encodings.of(examples[at : at + _TOGETHER])
        assert encoded is not None, "the model sees pictures"
        if model.encodes == "pixels":
            grey += [grey_pixels(picture_SS3) for picture_SS3 in encoded.numpy()]
            encoded = model.vision.features(encoded.to(model.device))
        features.append(encoded.float().mean(1).cpu())
    return np.stack(grey) if grey else None, torch.cat(features).numpy()
