"""What simple methods reach on the data of a run, in seconds: the yardstick for the trained adapter.

Examples with choices are classified from small grey pixels and from the encoder's features, by nearest neighbours and
by ridge regression, cross-validated. For captions and open answers, each question gets its most frequent answer. N
examples, M held-out examples, G pictures, D numbers of a vector, R axes, C classes or width of the features, H, W, S
picture.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llama_adapter.app.captioning.decisions.measures import NUM_FOLDS
from llama_adapter.app.learning.scores.answers import answer_scores
from llama_adapter.app.learning.scores.intervals import Figure, wilson_interval
from llama_adapter.app.learning.scores.outcome import Floats, Ints, Outcome, Task, task_of
from llama_adapter.app.learning.scores.scoring import measure_outcomes
from llama_adapter.app.learning.training.asking import TrainExample
from llama_adapter.app.learning.training.batches import Encodings
from llama_adapter.app.learning.training.model import TrainableModel
from llama_adapter.app.learning.training.prepare import TrainingData
from llama_adapter.app.learning.training.scoring import HEADLINES, SHOWN, drawn
from llama_adapter.runtime.text import shown_excerpt

MOST_MEASURED: Final = 2000  # of more examples, a sample is measured
_TOGETHER: Final = 64
GREY, FEATURES = "small grey pixels", "the encoder's features"
_ADVICE: Final = "Try, in this order: {}; more examples. Then look for examples with a wrong answer."
_MORE: Final = {False: "more --epochs; --sets bias,vision", True: "more --tower-epochs; more --epochs"}

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
    answer: str  # the most frequent right answer of the training examples; "": to each of several questions
    constant: Figure  # what it reaches if it is given to all examples; for shares, with Wilson's interval
    exact: float | None = None  # without choices: the share of examples for which it is right to the letter
    probes: tuple[Probe, ...] = ()  # only for examples with choices

    @property
    def rows(self) -> tuple[tuple[str, Figure], ...]:
        """Name and figure of each method, the constant answer first."""
        always = f"always “{shown_excerpt(self.answer, length=60)}”"
        name = always if self.answer else "the usual answer to each question"
        return ((name, self.constant), *((f"a {one.method} on {one.on}", one.figure) for one in self.probes))

    def lines(self) -> list[str]:
        """All figures, in at most four lines for a terminal."""
        part = "training" if self.task == "choices" else "test"
        way = f", {NUM_FOLDS}-fold cross-validation (95 % interval)" if self.probes else ""
        exact = "" if self.exact is None else f", to the letter {_share(self.exact)}"
        lines = [
            f"simple methods: {SHOWN[self.task]} on {self.constant.count:,} {part} examples{way}",
            f"  {self.rows[0][0]} {self._shown(self.constant)}{exact}",
        ]
        for on in dict.fromkeys(one.on for one in self.probes):
            figures = [(one.method, one.figure) for one in self.probes if one.on == on]
            found = (
                f"{method} {_share(one.value)} ({_share(one.low)} to {_share(one.high)})" for method, one in figures
            )
            lines.append(f"  {on}: {', '.join(found)}")
        return lines

    def verdict(self, score: Figure, *, num_usual: int = 0, has_eye: bool = False) -> str | None:
        """A sentence on an adapter that is not better than simple methods, with what to try; otherwise None.

        `has_eye` is whether the encoder was trained before the decoder. `score` is the adapter's figure
        `HEADLINES[task]` on the test examples. `num_usual` is the number of these examples that have the first method's
        answer. The result is None if the score is above chance and at least as high as that of the best
        method, or if its 95 % interval is above chance and includes the best method. Chance is what the first method
        reaches, here or on the test. The interval of shares is Wilson's. None with fewer than two examples.
        """
        value, chance, usual, of_usual = score.value, self.constant.value or 0.0, self.constant, ""
        if num_usual > chance * score.count:
            usual = _figure(num_usual, score.count)
            chance, of_usual = num_usual / score.count, " of the test"
            of_usual += ", which has one answer only" if num_usual == score.count else ""
        rows = ((self.rows[0][0], usual), *self.rows[1:])
        name, best = max(rows, key=lambda row: row[1].value or 0.0)
        is_above = value is not None and (value > chance or self.task == "captions")
        if value is None or score.count < 2 or (is_above and value >= (best.value or 0.0)):
            return None
        own = score if self.task == "captions" else _figure(round(value * score.count), score.count)
        low, high = (value if end is None else end for end in (own.low, own.high))
        is_near_chance = low <= chance
        if not is_near_chance and high >= (best.value or 0.0):
            return None
        same = "one answer for all" if self.answer else "the usual answers"
        floor = "chance" if self.task == "choices" else same
        judged = f"not clearly above {floor}" if is_near_chance else "below a simple method"
        others = dict(rows[:1] if is_near_chance else ()) | {name: best}
        reached = f"{SHOWN[self.task]} {self._shown(score)} on {score.count:,} test examples"
        others_shown = ", ".join(
            f"{name} {self._shown(figure)}{of_usual if figure is usual else ''}" for name, figure in others.items()
        )
        return f"the adapter is {judged}: {reached}; {others_shown}. {_ADVICE.format(_MORE[has_eye])}"

    def _shown(self, figure: Figure) -> str:
        return f"{figure.value or 0.0:.3f}" if self.task == "captions" else _share(figure.value)


def _share(value: float | None) -> str:
    return f"{100 * (value or 0.0):.1f} %"


def _figure(num_right: int, count: int) -> Figure:
    """The share of right answers with Wilson's 95 % interval."""
    low, high = wilson_interval(num_right, count)
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


def measure_answers(
    learned: Iterable[tuple[Hashable, Sequence[str]]], asked: Sequence[tuple[Hashable, Sequence[str]]]
) -> Yardstick:
    """What the most frequent right answer to each question in the training examples reaches on the test examples.

    `learned` and `asked` are the question and the right answers of each training and test example. The test examples
    determine whether they are captions or open answers, as they do when an adapter is scored. Questions that were not
    learned get the most frequent answer of all. Raises UsageError without test examples.
    """
    usual = defaultdict[Hashable, Counter[str]](Counter)
    for question, right in learned:
        usual[question].update(list(dict.fromkeys(right)))
    every = Counter[str]()
    for one in usual.values():
        every.update(one)
    answers = [usual.get(question, every).most_common(1)[0][0] for question, _ in asked]
    pairs = zip(answers, asked, strict=True)
    outcomes = [Outcome(picture="", question="", answer=answer, references=tuple(one[1])) for answer, one in pairs]
    task, count = task_of(outcomes), len(outcomes)
    value = measure_outcomes(task, outcomes).statistics(np.arange(count))[HEADLINES[task]] or 0.0
    constant = Figure(value=value, count=count) if task == "captions" else _figure(round(value * count), count)
    exact = float(answer_scores(outcomes)["exact"].mean())
    return Yardstick(task=task, answer="" if len(usual) > 1 else answers[0], constant=constant, exact=exact)


def yardstick_of(model: TrainableModel, data: TrainingData, encodings: Encodings) -> Yardstick | None:
    """What simple methods reach on the data before the training; None without test examples that need a constant.

    Small grey pixels are measured if the encodings are pixels, and the encoder's features if they are known.
    """
    chosen = [one for one in data.train if one.example.choices is not None and one.has_picture]
    if 2 * len(chosen) <= len(data.train):
        asked = [(one.prompt, one.example.answers) for one in data.test if one.example.choices is None]
        return measure_answers([(one.prompt, one.example.answers) for one in data.train], asked) if asked else None
    chosen = drawn(chosen, most=MOST_MEASURED)
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


GREY_SIDE: Final = 24
_LUMA: Final = np.array([0.299, 0.587, 0.114]) / 255  # ITU-R BT.601
_PENALTIES: Final = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2)  # of ridge regression, in mean variances of the axes
_LEAST_VALUE: Final = 1e-10  # smaller eigenvalues, as a share of the largest one, are rounding errors


def grey_pixels(picture_HW3: NDArray[np.uint8]) -> NDArray[np.float32]:
    """A picture of any size as a vector (576,) of 24 x 24 grey pixels, 0 to 1: means of equal areas."""
    height, width, _ = picture_HW3.shape
    small = _areas(height) @ (picture_HW3 @ _LUMA) @ _areas(width).T
    return small.astype(np.float32).ravel()


@lru_cache(maxsize=64)
def _areas(length: int) -> Floats:
    """The share of each of `length` pixels in the mean of each area, (24, length)."""
    edges, pixels = np.linspace(0, length, GREY_SIDE + 1), np.arange(length)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return np.asarray(np.clip(overlap, 0, None) * GREY_SIDE / length, dtype=np.float64)


def stratified_folds(labels_N: Ints, pictures: Sequence[str], *, seed: int) -> Ints:
    """The fold of each example, from 0. Each class is spread over the folds, and a picture is in one fold."""
    _, first_G, picture_N = np.unique(pictures, return_index=True, return_inverse=True)
    order_G = np.lexsort((np.random.default_rng(seed).random(len(first_G)), labels_N[first_G]))
    fold_G = np.empty(len(first_G), dtype=np.int64)
    fold_G[order_G] = np.arange(len(first_G)) % NUM_FOLDS
    return fold_G[picture_N]


def nearest_classes(vectors_ND: Floats, labels_N: Ints, fold_N: Ints, *, by_angle: bool) -> Ints:
    """The class of each example's nearest neighbour in other folds, (N,), by the cosine or the Euclidean distance."""
    lengths_N = np.linalg.norm(vectors_ND, axis=1)
    near_NN = vectors_ND @ vectors_ND.T
    near_NN = near_NN / np.maximum(lengths_N, 1e-30) if by_angle else 2 * near_NN - lengths_N**2
    near_NN[fold_N[:, None] == fold_N] = -np.inf
    found_N: Ints = labels_N[near_NN.argmax(axis=1)]
    return found_N


def linear_classes(vectors_ND: Floats, labels_N: Ints, fold_N: Ints) -> Ints:
    """The class of each example, (N,), by a ridge regression on the other folds."""
    targets_NC, found_N = np.eye(int(labels_N.max()) + 1)[labels_N], np.empty_like(labels_N)
    for fold in np.unique(fold_N):
        is_held_N = fold_N == fold
        scores_MC = ridge(vectors_ND[~is_held_N], targets_NC[~is_held_N], vectors_ND[is_held_N])
        found_N[is_held_N] = scores_MC.argmax(axis=1)
    return found_N


def standardised(vectors_ND: Floats) -> Floats:
    """The vectors with mean 0 and variance 1; numbers that are equal in all vectors become 0."""
    spread_D = vectors_ND.std(axis=0)
    return np.asarray((vectors_ND - vectors_ND.mean(axis=0)) / np.where(spread_D > 0, spread_D, 1.0), dtype=np.float64)


def ridge(vectors_ND: Floats, targets_NC: Floats, held_MD: Floats) -> Floats:
    """Ridge regression with an intercept (Hoerl and Kennard, 1970): the predictions (M, C) for the held-out vectors.

    Of a few penalties, the one with the smallest squared leave-one-out error is taken (PRESS of Allen, 1974). The axes
    come from the smaller one of the matrices (D, D) and (N, N).
    """
    mean_D, mean_C = vectors_ND.mean(axis=0), targets_NC.mean(axis=0)
    centred_ND, wanted_NC = vectors_ND - mean_D, targets_NC - mean_C
    is_dual = centred_ND.shape[1] > len(centred_ND)
    values_R, axes_DR = np.linalg.eigh(centred_ND @ centred_ND.T if is_dual else centred_ND.T @ centred_ND)
    is_kept_R = values_R > _LEAST_VALUE * values_R[-1]
    values_R, axes_DR = values_R[is_kept_R], axes_DR[:, is_kept_R]
    if is_dual:
        axes_DR = centred_ND.T @ axes_DR / np.sqrt(values_R)
    along_NR = centred_ND @ axes_DR
    products_RC = along_NR.T @ wanted_NC

    def error(penalty: float) -> float:
        shrunk_R = 1 / (values_R + penalty)
        leverage_N = along_NR**2 @ shrunk_R + 1 / len(along_NR)
        residual_NC = wanted_NC - (along_NR * shrunk_R) @ products_RC
        return float(((residual_NC / np.maximum(1 - leverage_N, 1e-9)[:, None]) ** 2).sum())

    mean_variance = values_R.sum() / max(1, len(values_R))
    penalty = min((mean_variance * factor for factor in _PENALTIES), key=error)
    predicted_MC: Floats = mean_C + (held_MD - mean_D) @ axes_DR @ (products_RC / (values_R + penalty)[:, None])
    return predicted_MC
