"""The questions of examples, the answers to them as outcomes, and files of outcomes. Imports no model."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, cast, get_args

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.captioning.tasks.choose import choosing
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.captioning.work_items import WorkItem, WorkQuestion
from llama_adapter.app.jobs.questions import complete, fill, picture_variables
from llama_adapter.app.jobs.records.record import recorded_choice
from llama_adapter.app.learning.labelled.example import Example
from llama_adapter.app.learning.scores.outcome import Outcome, Task
from llama_adapter.app.pictures.reading.reader import PictureReading
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.json_object import check_fields
from llama_adapter.runtime.text import shown_excerpt, shown_name

if TYPE_CHECKING:  # it imports torch
    from llama_adapter.app.captioning.captioner import Captioner

OUTCOMES_FORMAT: Final = "llama-adapter-outcomes"
OUTCOMES_VERSION: Final = 1

_LISTS: Final = ("references", "choices", "probabilities")
_FIELDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    **dict.fromkeys(("picture", "question", "answer", "part", "digest"), str),
    **{"references": list, "choices": (list, type(None)), "probabilities": (list, type(None))},
}

# Codes of errors of the model: it cannot answer the question, which counts as a wrong answer.
MODEL_ERRORS: Final = frozenset(("not_finite", "prompt"))


def outcome_of(
    example: Example, text: str, *, choice: Mapping[str, float | None] | None, error: str | None, shown: str
) -> Outcome | None:
    """The outcome of an example whose answer is `text`; None if its picture could not be read.

    `choice` has the probability of each choice, or None if it is not finite. `error` is the code of the error, if there
    is one. `shown` is the question as it was asked.
    """
    if error is not None and error not in MODEL_ERRORS:
        return None
    probabilities = None
    if error is None and choice is not None and example.choices is not None and None not in choice.values():
        probabilities = tuple(cast(float, choice[name]) for name in example.choices)
    return Outcome(
        picture="" if example.item.source is None else example.item.label,
        question=shown,
        answer=text if error is None else "",
        references=example.answers,
        choices=example.choices,
        probabilities=probabilities,
        part=example.part,
        digest=example.digest,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedOutcomes:
    """All outcomes of one evaluation."""

    model: str
    task: Task
    outcomes: tuple[Outcome, ...]


def write_outcomes(saved: SavedOutcomes, path: str | os.PathLike[str]) -> None:
    """Write JSON lines. The first line has format, model and task. The file is replaced atomically."""
    head = {"format": OUTCOMES_FORMAT, "version": OUTCOMES_VERSION, "model": saved.model, "task": saved.task}
    with atomic_write(path) as file:
        for line in (head, *map(asdict, saved.outcomes)):
            file.write(json.dumps(line).encode() + b"\n")


def read_outcomes(path: str | os.PathLike[str]) -> SavedOutcomes:
    """Read a file of `write_outcomes`. Raises UsageError, which names the line, if it is not valid, and OSError."""
    outcomes, line = [], 1
    try:
        with open(path, "rb") as file:
            head = json.loads(file.readline())
            if (head["format"], head["version"]) != (OUTCOMES_FORMAT, OUTCOMES_VERSION):
                raise ValueError(f"format {head['format']!r}, version {head['version']!r}")
            model, task = head["model"], head["task"]
            if not isinstance(model, str) or task not in get_args(Task):
                raise ValueError(f"model {model!r}, task {task!r}")
            for text in file:
                line += 1
                outcomes.append(_outcome(json.loads(text)))
    except (ValueError, KeyError, TypeError, RecursionError, UsageError) as error:
        raise UsageError(
            f"Wanted the outcomes of an evaluation ({OUTCOMES_FORMAT}, version {OUTCOMES_VERSION}) in "
            f"`{shown_name(path)}`, got something else in line {line} ({shown_excerpt(str(error))})",
            hint="`llama-adapter eval` writes them",
        ) from None
    return SavedOutcomes(model=model, task=task, outcomes=tuple(outcomes))


def _outcome(values: Any) -> Outcome:
    """The outcome of a line. Raises ValueError, TypeError or UsageError if it is invalid."""
    check_fields(values, _FIELDS, what="an outcome")
    lists = {name: None if values[name] is None else tuple(values[name]) for name in _LISTS}
    if not all(isinstance(text, str) for name in ("references", "choices") for text in lists[name] or ()):
        raise ValueError("a list with values that are not texts")
    return Outcome(**values | lists)


def question_of(example: Example, *, question: str | None, input: str | None = None) -> Question:
    """The question of an example; `question` and `input` are used for examples that have none.

    In questions about pictures, variables are filled in. In questions without a picture, braces are plain text.

    Raises TemplateError for an unknown variable.
    """
    common = Question(instruction=question, input=input, task=choosing(example.choices))
    asked = complete(common, example.question)
    if example.item.source is None:
        return asked
    return fill(asked, picture_variables(example.item.label, example.item.columns))


def by_picture(examples: Sequence[Example]) -> Iterable[list[int]]:
    """Indices of the examples of each picture, in order of appearance; each example without a picture is separate."""
    groups: dict[object, list[int]] = {}
    for index, example in enumerate(examples):
        source = example.item.source
        groups.setdefault(index if source is None else (source,), []).append(index)
    return groups.values()


def require_questions(without: Sequence[Example], *, count: int) -> None:
    """Raise UsageError if some of `count` examples are `without` a question."""
    if without:
        raise UsageError(
            f"Wanted a question for every example, but {len(without):,} of {count:,} have none, such as "
            f"{shown_excerpt(without[0].place)}",
            hint="pass one for these as --question",
        )


def ask_examples(captioner: "Captioner", examples: Sequence[Example], *, sampling: SamplingParams) -> list[Outcome]:
    """The examples with their answers, in the order of the examples.

    The answer to an example with choices is the most probable choice, with the probability of each choice. Other
    answers are generated text. An example without a question asks the model's caption prompt. A picture is read and
    encoded once for all its questions. Examples without a picture use the prefix that the model was trained with for
    texts.

    An example whose picture cannot be read is left out. If the model cannot answer an example, because its logits are
    not finite or the prompt is too long, the answer is empty, which counts as wrong.

    Raises TemplateError if a question has a variable that its example lacks, and UsageError if there are pictures but
    the model sees none.
    """
    if any(example.item.source is not None for example in examples):
        captioner.info.require_sight()
    asked = [question_of(example, question=None) for example in examples]
    found: dict[int, Outcome] = {}
    for event in captioner.run(list(work_items(captioner, examples, asked)), sampling=sampling):
        if not isinstance(event, Answer):
            continue
        code = None if event.error is None else event.error.code
        shown = asked[event.index].shown(captioner.info.default_prompt)
        choice = recorded_choice(event)
        outcome = outcome_of(examples[event.index], event.text, choice=choice, error=code, shown=shown)
        if outcome is not None:
            found[event.index] = outcome
    return [found[index] for index in sorted(found)]


def work_items(captioner: "Captioner", examples: Sequence[Example], asked: Sequence[Question]) -> Iterator[WorkItem]:
    """One work item for each picture, in their order, and for each example without one. `asked` has their questions."""
    default = captioner.info.default_prompt
    for group in by_picture(examples):
        item = examples[group[0]].item
        picture = PictureReading(digest=captioner.info.text_prefix()) if item.source is None else item.source
        questions = (
            WorkQuestion(index=index, prompt=asked[index].prompt(default), task=asked[index].task) for index in group
        )
        yield WorkItem(picture=picture, label=item.label, questions=tuple(questions))
