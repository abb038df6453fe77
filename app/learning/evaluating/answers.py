"""Answers labelled examples in one call of a captioner. `job.py` does the same with records on disk."""

from collections.abc import Iterator, Sequence

from llama_adapter.app.captioning.captioner import Answer, Captioner, WorkItem, WorkQuestion
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.jobs.records.record import recorded_choice
from llama_adapter.app.learning.evaluating.outcomes import by_picture, outcome_of, question_of
from llama_adapter.app.learning.labelled.example import Example
from llama_adapter.app.learning.scores.outcome import Outcome
from llama_adapter.app.pictures.reading.reader import PictureReading
from llama_adapter.llm.engine.sampling_params import SamplingParams


def ask_examples(captioner: Captioner, examples: Sequence[Example], *, sampling: SamplingParams) -> list[Outcome]:
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


def work_items(captioner: Captioner, examples: Sequence[Example], asked: Sequence[Question]) -> Iterator[WorkItem]:
    """One work item for each picture, in order of appearance, and one for each example without a picture.

    `asked` has the question of each example.
    """
    default = captioner.info.default_prompt
    for group in by_picture(examples):
        item = examples[group[0]].item
        picture = PictureReading(digest=captioner.info.text_prefix()) if item.source is None else item.source
        questions = (
            WorkQuestion(index=index, prompt=asked[index].prompt(default), task=asked[index].task) for index in group
        )
        yield WorkItem(picture=picture, label=item.label, questions=tuple(questions))
