"""Evaluates a model on held-out examples: scores of a captioner's answers, and the loss of the right answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from llama_adapter.app.captioning.assemble import assemble_parts
from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.learning.evaluating.outcomes import ask_examples
from llama_adapter.app.learning.scores.outcome import Outcome, Task, task_of
from llama_adapter.app.learning.scores.scoring import Scores, measure_outcomes
from llama_adapter.app.learning.training.asking import TrainExample
from llama_adapter.app.learning.training.batches import Encodings, drawn_lessons, microbatches
from llama_adapter.app.learning.training.model import TrainableModel
from llama_adapter.app.learning.training.ranks import Distributed, OneRank
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.schemes.scheme import dtype_name
from llama_adapter.runtime.text import shown_excerpt

# Task -> the metric for early stopping.
HEADLINES: Final[dict[Task, str]] = {"choices": "accuracy", "open": "normalised", "captions": "CIDEr-D"}
SHOWN: Final[dict[Task, str]] = {"choices": "accuracy", "open": "right answers", "captions": "CIDEr-D"}  # in messages
MOST_UNEQUAL: Final = 3  # the largest class of the test in sizes of the smallest, with the accuracy alone
MOST_SCORED: Final = 1000  # examples of one evaluation during a run
MOST_COMPARED: Final = 100_000  # choices that the examples of one evaluation are compared with, if not asked for
_SAMPLING: Final = SamplingParams(max_new_tokens=64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """The result of one evaluation."""

    loss: float | None  # mean over labels
    score: float | None  # None: answers are not scored
    measure: str = "score"  # what the score is, for messages

    @property
    def key(self) -> list[float]:
        """Larger is better: compares scores, and between equal scores the smaller loss is better."""
        loss = -np.inf if self.loss is None or self.loss != self.loss else -self.loss
        return [loss] if self.score is None else [self.score, loss]


def answered(captioner: Captioner, examples: Sequence[TrainExample]) -> dict[Task, list[Outcome]]:
    """Outcomes by task: examples with choices are one task, all others together are another."""
    found: dict[Task, list[Outcome]] = {}
    for has_choices in (True, False):
        chosen = [one.example for one in examples if (one.example.choices is not None) == has_choices]
        if chosen and (outcomes := ask_examples(captioner, chosen, sampling=_SAMPLING)):
            found[task_of(outcomes)] = outcomes
    return found


def num_compared(examples: Sequence[TrainExample]) -> int:
    """The number of choices that the examples have together. Scoring compares each example with all its choices."""
    return sum(len(one.example.choices or ()) for one in examples)


def drawn(examples: Sequence[TrainExample], *, most: int = MOST_SCORED) -> list[TrainExample]:
    """At most so many of the examples, in their order. They are drawn at random, because data may be sorted."""
    places = np.random.default_rng(0).permutation(len(examples))[:most]
    return [examples[place] for place in np.sort(places)]


def headline(outcomes: dict[Task, list[Outcome]]) -> tuple[float, str]:
    """The mean of the tasks' `HEADLINES`, weighted by their numbers of examples, and its name; 0 without any."""
    if not outcomes:
        return 0.0, "score"
    values = [
        measure_outcomes(task, of_task).statistics(np.arange(len(of_task)))[HEADLINES[task]] or 0.0
        for task, of_task in outcomes.items()
    ]
    names = [SHOWN[task] for task in outcomes]
    name = names[0] if len(names) == 1 else f"mean of {' and '.join(names)}"
    return float(np.average(values, weights=[len(of_task) for of_task in outcomes.values()])), name


def shown_test(scores: Scores) -> str:
    """The figure `HEADLINES` of the test examples, and the balanced accuracy if the sizes of classes differ much.

    An accuracy alone may hide that a rare class is always wrong, and says nothing about a class without test examples.
    """
    figure = scores.figures[HEADLINES[scores.task]]
    interval = "" if figure.low is None else f" (95 % interval {figure.low:.3f} to {figure.high:.3f})"
    line = f"test: {HEADLINES[scores.task]} {figure.value or 0.0:.3f}{interval} of {figure.count:,} examples"
    counts = {name: own["recall"].count for name, own in scores.classes.items()}
    sizes, absent = list(filter(None, counts.values())), [name for name, count in counts.items() if not count]
    if sizes and max(sizes) > MOST_UNEQUAL * min(sizes):
        balanced = scores.figures["balanced accuracy"].value or 0.0
        line += f"; balanced accuracy {balanced:.3f}, as classes have {min(sizes):,} to {max(sizes):,} examples"
    if absent:
        of = shown_excerpt(absent[0]) if len(absent) == 1 else f"{len(absent):,} of {len(counts):,} classes"
        line += f"; it says nothing about {of}, without examples in the test"
    return line


def captioner_of(model: TrainableModel, spec: CaptionerSpec) -> Captioner:
    """A captioner with the model's present weights."""
    computed = CaptionerSpec(
        device=spec.device,
        dtype=dtype_name(model.dtype),
        mode="eager",  # graphs need memory that the plan of a training does not contain
        context=model.decoder_config.context,
        exif=spec.exif,
        reading=spec.reading,
        transparency=spec.transparency,
        damaged=spec.damaged,
    )
    return Captioner(assemble_parts(computed, load=model.loaded_model))


class Validator:
    """Computes a `Validation` of a model. All ranks must call it together."""

    def __init__(
        self,
        distributed: Distributed,
        examples: Sequence[TrainExample],
        *,
        encodings: Encodings,
        rows: int,
        ranks: OneRank,
        open_captioner: Callable[[], Captioner] | None,
    ) -> None:
        """If `open_captioner` is None, answers are not scored."""
        self._distributed, self._examples, self._encodings, self._rows = distributed, examples, encodings, rows
        self._ranks, self._open_captioner = ranks, open_captioner

    def __call__(self) -> Validation:
        """Evaluate the model. Raises the errors of a captioner."""
        score_now, measure = 0.0, ""
        if self._open_captioner is not None and self._ranks.is_first:
            with self._open_captioner() as captioner:
                score_now, measure = headline(answered(captioner, drawn(self._examples)))
        loss = self._loss()
        of_first = self._ranks.sum(torch.tensor([score_now], dtype=torch.float64))
        score = None if self._open_captioner is None else float(of_first)
        return Validation(loss=loss, score=score, measure=measure)

    @torch.no_grad()
    def _loss(self) -> float | None:
        lessons = drawn_lessons(self._examples, range(len(self._examples)), key=(0, 0))
        parts = microbatches(lessons, rows=self._rows, rank=self._ranks.rank, num_ranks=self._ranks.size)
        model, sums = self._distributed.model, torch.zeros(2, dtype=torch.float64)
        for part in parts:
            loss, _ = model(*self._encodings.given(part).inputs(model.device))
            sums += torch.tensor([float(loss) * part.weight, part.num_labels], dtype=torch.float64)
        total, num_labels = self._ranks.sum(sums).tolist()
        return float(total / num_labels) if num_labels else None
