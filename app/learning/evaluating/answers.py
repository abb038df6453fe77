"""Answers labelled examples in one call of a captioner. `job.py` does the same with records on disk."""

from collections.abc import Callable, Iterator, Sequence

from llama_adapter.app.captioning.captioner import Answer, Captioner, WorkItem, WorkQuestion
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.jobs.records.record import recorded_choice
from llama_adapter.app.learning.evaluating.outcomes import Reply, outcome_of
from llama_adapter.app.learning.evaluating.question import question_of
from llama_adapter.app.learning.labelled.example import Example
from llama_adapter.app.learning.scores.outcome import Outcome
from llama_adapter.app.pictures.reading.reader import PictureReading, Reader
from llama_adapter.llm.engine.sampling_params import SamplingParams


def _ignore(message: str) -> None:
    pass


def ask_examples(
    captioner: Captioner,
    examples: Sequence[Example],
    *,
    question: str | None = None,
    sampling: SamplingParams | None = None,
    reader: Reader | None = None,
    tell: Callable[[str], None] = _ignore,
) -> list[Outcome]:
    """The examples with their answers, in the order of the examples.

    The answer to an example with choices is the most probable choice, with the probability of each choice. Other
    answers are generated text. A picture is read and encoded once for all its questions. Examples without a picture use
    the prefix that the model was trained with for texts.

    Parameters:
        question: the question for examples that have none; None: the model's caption prompt.
        sampling: for generated answers. Default: greedy.
        reader: reads pictures; it is not closed. Default: the captioner's reader.
        tell: called with a sentence about each example that has no answer.

    An example whose picture cannot be read is left out. If the model cannot answer an example, because its logits are
    not finite or the prompt is too long, the answer is empty, which counts as wrong.

    Raises TemplateError if a question has a variable that its example lacks, and UsageError if there are pictures but
    the model sees none.
    """
    if any(example.item.source is not None for example in examples):
        captioner.info.require_adapter()
    asked = [question_of(example, question=question) for example in examples]
    items = list(_items(captioner, examples, asked))
    found: dict[int, Outcome] = {}
    for event in captioner.run(items, sampling=sampling or SamplingParams(), reader=reader):
        if not isinstance(event, Answer):
            continue
        example = examples[event.index]
        if event.error is not None:
            tell(event.error.message)
        code = None if event.error is None else event.error.code
        reply = Reply(text=event.text, choice=recorded_choice(event), error=code)
        outcome = outcome_of(example, reply, shown=asked[event.index].shown(captioner.info.default_prompt))
        if outcome is not None:
            found[event.index] = outcome
    return [found[index] for index in sorted(found)]


def _items(captioner: Captioner, examples: Sequence[Example], asked: Sequence[Question]) -> Iterator[WorkItem]:
    """One work item for each picture, in order of appearance, and one for each example without a picture."""
    default, text_prefix = captioner.info.default_prompt, captioner.info.text_prefix()
    groups: dict[object, list[int]] = {}
    for index, example in enumerate(examples):
        source = example.item.source
        groups.setdefault(index if source is None else (source,), []).append(index)
    for group in groups.values():
        item = examples[group[0]].item
        yield WorkItem(
            picture=PictureReading(digest=text_prefix) if item.source is None else item.source,
            label=item.label,
            questions=tuple(
                WorkQuestion(index=index, prompt=asked[index].prompt(default), task=asked[index].task)
                for index in group
            ),
        )
