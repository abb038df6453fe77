"""Reads and checks the DATA of `eval` before a model is loaded: the examples to ask."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from llama_adapter.app.jobs.questions import TemplateError
from llama_adapter.app.learning.evaluating.outcomes import question_of, require_questions
from llama_adapter.app.learning.labelled.checks import check_split_names, picture_key
from llama_adapter.app.learning.labelled.example import LISTING, Example, shown_problems
from llama_adapter.app.learning.labelled.reading import read_examples
from llama_adapter.app.learning.labelled.rows import Columns, split_name
from llama_adapter.app.learning.scores.outcome import Task, are_captions
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.inputs.fields import as_template
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.given import require_least
from llama_adapter.runtime.text import shown_excerpt, shown_name

if TYPE_CHECKING:  # data are read without torch
    from llama_adapter.app.models.checkpoints import StoredQuestions

ALL_SPLITS: Final = "all"
_TEST: Final = "test"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """Which examples are asked, and how their answers are scored."""

    data: tuple[str, ...]
    question: str | None = None  # the question for examples that have none
    choices: tuple[str, ...] | None = None  # the choices for all examples; None: each example's own choices
    picture_folder: str | None = None  # of the pictures that tables and known sets name; None: the usual places
    sample_fields: tuple[str, ...] | None = None  # of archives: the field of the picture, and that of the text
    split: str | None = None  # None: test, if the data have this split, otherwise all examples
    limit: int | None = None  # the most examples, drawn by picture
    seed: int = 0  # seed of this draw
    task: Task | None = None  # None: determined by the data

    def __post_init__(self) -> None:
        require_least(self, "limit")
        require_least(self, "seed", least=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationData:
    """The examples to ask, in the order of the data."""

    examples: tuple[Example, ...]
    task: Task
    split: str  # ALL_SPLITS, or a split of the data
    unreadable: dict[str, str]  # name of a missing or unreadable picture -> place and reason
    warnings: tuple[str, ...]  # other problems of the data
    model_questions: Mapping[str, str]  # kind of examples without a question -> what the model stores for them


def read_data(settings: DataSettings, *, stored: Callable[[], "StoredQuestions"]) -> EvaluationData:
    """Read and check the data. Decodes no picture.

    `stored` reads the questions that the model stores. It is called only if neither the data nor the settings have a
    question for some examples.

    Missing and unreadable pictures are left out; other errors in the data are raised. Raises InputsError, UsageError
    and OSError.
    """
    columns = Columns(
        choices=settings.choices,
        question=settings.question,
        picture_folder=settings.picture_folder,
        fields=settings.sample_fields,
    )
    found = read_examples(*settings.data, columns=columns)
    chosen = None if settings.split is None else split_name(settings.split)
    if chosen != ALL_SPLITS:
        check_split_names(found, report=found.refuse if chosen is None else found.warn, chosen=chosen)
    found.require_sound(needs_all_pictures=False)
    examples, split = _of_split(found.examples, split=settings.split)
    examples, task = _of_task(examples, task=settings.task)
    model_questions = {}
    bare = [one for one in examples if one.question.instruction is None]
    if settings.question is None and bare:
        model_questions = ask_stored(examples, stored())
    if missing := _missing_classes(bare, question=model_questions.get("examples", "")):
        found.warn(
            "the classes of the data",
            f"answers are not compared with {shown_excerpt(', '.join(missing))}, which the model's question lists: "
            "name all classes with --choices",
        )
    _check_questions(examples, question=settings.question)
    left_out = ((one.unreadable, str(one)) for one in found.problems if one.unreadable is not None)
    unreadable = {example.item.label: reason for example, reason in left_out if split in (ALL_SPLITS, example.split)}
    return EvaluationData(
        examples=tuple(_drawn(examples, count=settings.limit, seed=settings.seed)),
        task=task,
        split=split,
        unreadable=unreadable,
        warnings=tuple(shown_problems(one for one in found.problems if one.is_warning)),
        model_questions=model_questions,
    )


def ask_stored(examples: list[Example], stored: "StoredQuestions") -> dict[str, str]:
    """Give the examples without a question that which the model learned; returns the used questions by kind.

    Captions are left as they are, because they ask the model's caption prompt.
    """
    asked: dict[str, str] = {}
    for index, example in enumerate(examples):
        if example.question.instruction is not None:
            continue
        if example.task == "caption":
            asked["captions"] = stored.prompt
        elif stored.question is not None:
            asked["examples"] = stored.question
            text = stored.question if example.item.source is None else as_template(stored.question)
            examples[index] = replace(example, question=replace(example.question, instruction=text))
    return asked


def _missing_classes(examples: Sequence[Example], *, question: str) -> list[str]:
    """The classes that the model's question lists, and that the choices of some of the examples lack."""
    if not question.startswith(LISTING):
        return []
    listed = question.removeprefix(LISTING).removesuffix("?").split(", ")
    choices = dict.fromkeys(one.choices for one in examples if one.choices is not None)
    compared = [set(", ".join(names).split(", ")) for names in choices]  # names may have commas
    return [name for name in listed if any(name not in names for names in compared)]


def model_questions_notes(asked: Mapping[str, str], spec: CaptionerSpec) -> Iterator[str]:
    """Sentences about the questions that come from the model: `asked` is what `ask_stored` returned."""
    path = spec.decoder or spec.adapter or spec.model or spec.llama_dir
    model = "the embedded model" if path is None else f"`{shown_name(path)}`"
    for kind, text in asked.items():
        yield f"{kind} without a question are asked “{shown_excerpt(text)}”, the default question of {model}"


def _check_questions(examples: Sequence[Example], *, question: str | None) -> None:
    """Raise UsageError if examples have no question, or a question has a variable that examples lack."""
    without = [
        example
        for example in examples
        if question is None
        and example.question.instruction is None
        and (example.task != "caption" or example.item.source is None)
    ]
    require_questions(without, count=len(examples))
    unfilled: list[tuple[Example, TemplateError]] = []
    for example in examples:
        try:
            question_of(example, question=question)
        except TemplateError as error:
            unfilled.append((example, error))
    if unfilled:
        first, refusal = unfilled[0]
        raise UsageError(
            f"{refusal.message}, for {len(unfilled):,} of {len(examples):,} examples, such as "
            f"{shown_excerpt(first.place)}",
            hint=refusal.hint,
        )


def _of_split(examples: Sequence[Example], *, split: str | None) -> tuple[list[Example], str]:
    """The examples of a split, and its name. Raises UsageError if no example has this split."""
    counts = Counter(example.split for example in examples)
    name = (_TEST if counts[_TEST] else ALL_SPLITS) if split is None else split_name(split)
    if name == ALL_SPLITS:
        return list(examples), name
    if not counts[name]:
        named = ", ".join(sorted(filter(None, counts))) or "none"
        raise UsageError(
            f"Wanted the split {shown_excerpt(name)}, but no example is in it; the data name {named}",
            hint=f"pass --split {ALL_SPLITS} for all examples",
        )
    return [example for example in examples if example.split == name], name


def _of_task(examples: Sequence[Example], *, task: Task | None) -> tuple[list[Example], Task]:
    """The examples of a task, and the task. Raises UsageError if there are none, or if the data have several tasks."""
    num_choices = sum(example.choices is not None for example in examples)
    if task is None and 0 < num_choices < len(examples):
        raise UsageError(
            f"Wanted choices for all examples or for none, but {num_choices:,} of {len(examples):,} have some",
            hint="--task choices asks only these, --task open generates all answers",
        )
    if task is None and not num_choices:
        is_described = all(example.task == "caption" for example in examples)
        is_described |= are_captions([answer for example in examples for answer in example.answers])
        task = "captions" if is_described else "open"
    if task in (None, "choices"):
        if not num_choices:
            raise UsageError(
                "--task choices needs examples with choices, but these have none",
                hint="name them in a column `choices`, or pass --choices",
            )
        return [example for example in examples if example.choices is not None], "choices"
    assert task is not None
    return [replace(example, choices=None) for example in examples], task


def _drawn(examples: Sequence[Example], *, count: int | None, seed: int) -> list[Example]:
    """At most `count` examples in their order, of whole pictures if one fits. A larger `count` only adds examples."""
    if count is None or count >= len(examples):
        return list(examples)

    def drawn(index: int) -> bytes:
        return hashlib.sha256(f"{seed}\n{picture_key(examples[index])}".encode(errors="surrogatepass")).digest()

    *taken, following = sorted(range(len(examples)), key=drawn)[: count + 1]
    whole = [index for index in taken if drawn(index) != drawn(following)]
    return [examples[index] for index in sorted(whole or taken)]
