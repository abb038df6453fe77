"""Reads and checks the DATA of `train` before a model is loaded: training, validation and test examples."""

import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llama_adapter.app.learning.evaluating.outcomes import require_questions
from llama_adapter.app.learning.labelled.checks import check_split_names, data_digest, picture_key
from llama_adapter.app.learning.labelled.example import Example, Examples, shown_problems
from llama_adapter.app.learning.labelled.reading import read_examples
from llama_adapter.app.learning.labelled.rows import SPLITS, Columns
from llama_adapter.app.learning.labelled.splitting import split_examples
from llama_adapter.app.learning.training.asking import Asker, TrainExample, default_question
from llama_adapter.app.learning.training.job import TrainJob
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.text import shown_excerpt

TRAIN, VALIDATION, TEST = PARTS = SPLITS
LEAST_EXAMPLES: Final = 4  # to learn
FEW_LEARNED, FEW_TESTED = 10, 3  # examples of a class; a note names the classes with fewer
_MOST_NAMED: Final = 10  # classes in the note
_METHOD: Final = 4  # of training a picture tower: a run that was begun by another one is not continued


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreadable:
    """A picture that cannot be read and is left out."""

    label: str
    reason: str
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingData:
    """The examples of each part, in the order of the data."""

    train: tuple[TrainExample, ...]
    validation: tuple[TrainExample, ...]
    test: tuple[TrainExample, ...]
    digest: str  # over all examples
    unreadable: tuple[Unreadable, ...] = ()  # pictures whose files exist but cannot be read; they are left out
    warnings: str = ""  # problems that leave the data usable, one per line

    @property
    def everything(self) -> tuple[TrainExample, ...]:
        return (*self.train, *self.validation, *self.test)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(one.num_tokens for one in self.everything)

    def without(self, digests: set[str]) -> "TrainingData":
        """The data without the examples of these pictures. Raises UsageError if too few training examples are left."""
        parts = {name: tuple(one for one in part if one.example.digest not in digests) for name, part in self.parts}
        _require_enough({TRAIN: len(parts[TRAIN])}, because=", as the pictures of the others cannot be read")
        return dataclasses.replace(self, train=parts[TRAIN], validation=parts[VALIDATION], test=parts[TEST])

    @property
    def parts(self) -> Sequence[tuple[str, tuple[TrainExample, ...]]]:
        """The examples of each part, with its name."""
        return ((TRAIN, self.train), (VALIDATION, self.validation), (TEST, self.test))

    def few_of_classes(self) -> str | None:
        """A sentence that names the classes with few examples to learn or for the test, with both numbers; else None.

        Several examples of a picture count once. Only if all have the same choices, which are then the classes.
        """
        choices = {one and tuple(sorted(one)) for one in {each.example.choices for each in self.everything}}
        if len(choices) != 1 or (classes := choices.pop()) is None:
            return None
        learned, tested = _pictures_of_classes(self.train), _pictures_of_classes(self.test)
        few = []
        for name in classes:
            is_tested_little = bool(self.test) and tested[name] < FEW_TESTED
            if learned[name] < FEW_LEARNED or is_tested_little:
                test = f" and {tested[name]:,} for the test" if self.test else ""
                few.append(f"{shown_excerpt(name, length=60)} ({learned[name]:,} to learn{test})")
        if not few:
            return None
        named = [*few[:_MOST_NAMED], *([f"{len(few) - _MOST_NAMED:,} more"] if len(few) > _MOST_NAMED else [])]
        test = f" and {FEW_TESTED} for the test" if self.test else ""
        return (
            f"these classes have few examples: {', '.join(named)}; with fewer than {FEW_LEARNED} to learn{test}, "
            "answers are often wrong, or their scores say little, so add examples"
        )

    def to_dict(self) -> dict[str, Any]:
        """The content of `data.json`: the digest, and for each part its size and the digests of its pictures."""
        return {
            "digest": self.digest,
            "parts": {
                name: {
                    "examples": len(part),
                    "answers": dict(Counter(one.example.answers[0] for one in part).most_common(100)),
                    "pictures": sorted({one.example.digest for one in part if one.example.digest}),
                }
                for name, part in self.parts
            },
        }


def _pictures_of_classes(part: Sequence[TrainExample]) -> Counter[str]:
    """The number of different pictures of each right answer."""
    return Counter(answer for answer, _ in {(one.example.answers[0], picture_key(one.example)) for one in part})


def read_data(job: TrainJob) -> Examples:
    """The examples of the job's data, each with its question. Decodes no picture and loads no model.

    Problems of single examples are in the result. Raises InputsError if the data are unusable as a whole, UsageError if
    examples need a question, and OSError.
    """
    columns = Columns(question=job.question, picture_folder=job.pictures, fields=job.sample_fields)
    found = read_examples(*job.data, columns=columns)
    found.examples[:] = [_with_question(example, given=job.question) for example in found.examples]
    without = [one for one in found.examples if one.task == "answer" and one.question.instruction is None]
    require_questions(without, count=len(found.examples))
    return found


def _with_question(example: Example, *, given: str | None) -> Example:
    if example.question.instruction is not None:
        return example
    instruction = default_question(example) if given is None else given
    return dataclasses.replace(example, question=dataclasses.replace(example.question, instruction=instruction))


def prepare(job: TrainJob, found: Examples, *, asker: Asker, context: int) -> TrainingData:
    """The examples as tokens, divided into parts. Raises InputsError, which lists all problems, and UsageError."""
    check_split_names(found, report=found.refuse)
    asked = asker.ask_all(found, context=context)
    unreadable = _taken_out(found)
    found.require_sound()
    shares = {TRAIN: 1 - job.validation - job.test, VALIDATION: job.validation, TEST: job.test}
    parts = split_examples(
        found.examples, shares={name: share for name, share in shares.items() if share}, seed=job.seed
    )
    tokens: Mapping[str, tuple[TrainExample, ...]] = {
        name: tuple(asked[id(example)] for example in parts.get(name, ())) for name in PARTS
    }
    _require_enough({name: len(part) for name, part in tokens.items() if shares[name] or part})
    return TrainingData(
        train=tokens[TRAIN],
        validation=tokens[VALIDATION],
        test=tokens[TEST],
        digest=data_digest(found.examples),
        unreadable=unreadable,
        warnings="\n".join(shown_problems(problem for problem in found.problems if problem.is_warning)),
    )


def _require_enough(counts: Mapping[str, int], *, because: str = "") -> None:
    """Raise UsageError unless there are enough training examples, and an example in each of the other parts."""
    if counts[TRAIN] < LEAST_EXAMPLES:
        others = "".join(f"; {count:,} for {name}" for name, count in counts.items() if name != TRAIN and count)
        raise UsageError(
            f"Wanted at least {LEAST_EXAMPLES} examples to learn, got {counts[TRAIN]:,}{because}{others}",
            hint="add examples, or give fewer of them to the other splits: --validation, --test, or a column `split`",
        )
    empty = next((name for name, count in counts.items() if not count), None)
    if empty is not None:
        raise UsageError(
            f"Wanted examples in each split, got none for `{empty}` of {sum(counts.values()):,} examples",
            hint=f"add examples, or raise --{empty}; --{empty} 0 does without this split",
        )


def _taken_out(found: Examples) -> tuple[Unreadable, ...]:
    """Remove unreadable pictures from the problems of `found`, and return them. Missing files stay problems."""
    kept, out = [], []
    for one in found.problems:
        source = None if one.unreadable is None else one.unreadable.item.source
        if one.unreadable is None or (isinstance(source, str) and not os.path.isfile(source)):
            kept.append(one)
        else:
            out.append(Unreadable(label=one.unreadable.item.label, reason=one.reason, digest=""))
    found.problems[:] = kept
    return tuple(out)


def run_digest(job: TrainJob, data: TrainingData, *, model: str = "") -> str:
    """SHA-256 over what a run depends on, which resumes only with the same. `model` is its digest, "" if not open."""
    values = {
        "model": model,
        "pictures": dataclasses.asdict(job.spec.pictures),
        "data": data.digest,
        "train": [hashlib.sha256(repr(one.rows).encode()).hexdigest() for one in data.train],
        "choice": dataclasses.asdict(job.choice),
        "seed": job.seed,
        "optimisation": {
            name: value for name, value in dataclasses.asdict(job.optimisation).items() if name not in ("rows", "skip")
        },
        "lr": job.lr,
    }
    if "picture tower" in job.choice.kinds:
        values |= {"method": _METHOD, "keeps_last": job.keeps_last}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
