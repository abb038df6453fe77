"""`eval` from start to end: reads labelled data, writes answers, metrics and reports."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from llama_adapter.app.jobs.job import Job
from llama_adapter.app.jobs.job_planner import JobPlanner
from llama_adapter.app.jobs.records.record import Record, read_records
from llama_adapter.app.jobs.run import run_job
from llama_adapter.app.jobs.runner import LocalRunner
from llama_adapter.app.learning.evaluating.comparing import OUTCOMES, check_against, compare_with, read_against
from llama_adapter.app.learning.evaluating.data import (
    ALL_SPLITS,
    DataSettings,
    EvaluationData,
    model_questions_notes,
    read_data,
)
from llama_adapter.app.learning.evaluating.outcomes import (
    MODEL_ERRORS,
    SavedOutcomes,
    by_picture,
    outcome_of,
    question_of,
    write_outcomes,
)
from llama_adapter.app.learning.labelled.checks import data_digest
from llama_adapter.app.learning.labelled.example import Example
from llama_adapter.app.learning.scores.compare import Comparison
from llama_adapter.app.learning.scores.intervals import Draws
from llama_adapter.app.learning.scores.outcome import Outcome
from llama_adapter.app.learning.scores.report import SCORES, as_html, as_json, as_markdown, thumbnail_of
from llama_adapter.app.learning.scores.scoring import Scores, score
from llama_adapter.app.models.sight import require_sight
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.inputs import PictureInput, QuestionFields
from llama_adapter.app.pictures.reading.reader import PictureReading
from llama_adapter.runtime.atomic_write import write_text
from llama_adapter.runtime.errors import ExitCode
from llama_adapter.runtime.locking import locked_output
from llama_adapter.runtime.terminal.stderr_lines import say
from llama_adapter.runtime.text import shown_name

if TYPE_CHECKING:  # data are read without torch
    from llama_adapter.app.models.checkpoints import StoredQuestions

ANSWERS: Final = "answers.jsonl"  # the records, in the folder of an evaluation
_MOST_NAMED: Final = 5  # pictures that a note names


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationJob:
    """One run of `eval`, as plain values."""

    data: DataSettings
    out: str  # folder for answers and reports
    against: str | None = None  # the folder of another evaluation of the same data
    answering: Job  # asks the questions; it gets its `items` when the data are read


class _Asked(NamedTuple):
    """A picture with its distinct questions, or one question without a picture, and the examples that ask them."""

    item: PictureInput
    examples: tuple[tuple[int, int], ...]  # indices of an example, and of its question in `item`


def run_evaluation(job: EvaluationJob) -> int:
    """Ask every example, write answers and reports into `out`, and print the figures on stdout; returns the exit code.

    Examples that an earlier run answered are not asked again. Raises the errors that runtime/problems.py lists. Errors
    in the data are raised before the model is loaded. Only one run at a time writes into `out`.
    """
    with locked_output(job.out):
        return _run(job)


def _run(job: EvaluationJob) -> int:
    against = None if job.against is None else read_against(job.against, out=job.out)
    data = read_data(job.data, stored=lambda: _stored(job.answering.spec))
    if against is not None:
        check_against(against, data, question=job.data.question, path=str(job.against))
    _say_problems(job, data)
    asked = list(_asked(data.examples, question=job.data.question))
    answering, runner = _with_items(job.answering, asked), LocalRunner()
    code = run_job(answering, runner)
    if code == ExitCode.INTERRUPTED:
        return code
    folder = Path(job.out)
    planner = JobPlanner(answering, spec=runner.spec, info=runner.info)
    outcomes, unreadable, num_refused = _answered(data.examples, asked, planner, read_records(folder / ANSWERS))
    if not outcomes:
        say("error: none of the examples was answered")
        return ExitCode.FAILED
    unreadable = data.unreadable | unreadable
    saved = SavedOutcomes(model=runner.info.name, task=data.task, outcomes=tuple(outcomes))
    draws = Draws(seed=job.data.seed)
    notes = _notes(job, data, unreadable=unreadable, num_refused=num_refused)
    scores = score(outcomes, model=saved.model, task=data.task, draws=draws, notes=notes)
    write_outcomes(saved, folder / OUTCOMES)
    comparison = None
    if against is not None:
        comparison = compare_with(
            against, saved, path=str(job.against), out=job.out, draws=draws, quiet=job.answering.quiet
        )
    _write_reports(folder, scores, comparison, examples=data.examples)
    print(as_markdown(dataclasses.replace(scores, worst=()), comparison), end="")
    if not job.answering.quiet:
        say(f"the reports are in `{shown_name(job.out)}`; scores.html shows the worst answers")
    return ExitCode.PICTURE_ERRORS if unreadable or num_refused else ExitCode.OK


def _stored(spec: CaptionerSpec) -> "StoredQuestions":
    from llama_adapter.app.models.stream_model import stored_questions

    return stored_questions(spec)


def _say_problems(job: EvaluationJob, data: EvaluationData) -> None:
    if any(example.item.source is not None for example in data.examples):
        require_sight(job.answering.spec)
    for reason in data.unreadable.values():
        say(f"error: {reason}")
    asked = model_questions_notes(data.model_questions, job.answering.spec)
    for note in (*data.warnings, *asked) if not job.answering.quiet else ():
        say(f"note: {note}")


def _asked(examples: Sequence[Example], *, question: str | None) -> Iterator[_Asked]:
    """Each picture with all its questions, in order of appearance; each example without a picture separately.

    POPE has some questions in several parts; the model is asked once.
    """
    for group in by_picture(examples):
        places: dict[QuestionFields, int] = {}
        asking = []
        for index in group:
            asked = question_of(examples[index], question=question)
            own = QuestionFields(instruction=asked.instruction, input=asked.input, choices=examples[index].choices)
            asking.append((index, places.setdefault(own, len(places))))
        item = dataclasses.replace(examples[group[0]].item, questions=tuple(places))
        yield _Asked(item=item, examples=tuple(asking))


def _with_items(job: Job, asked: Sequence[_Asked]) -> Job:
    """The job that answers the questions of all examples."""
    is_text = all(one.item.source is None for one in asked)
    return dataclasses.replace(
        job,
        inputs=dataclasses.replace(job.inputs, is_text=is_text),
        items=tuple(one.item for one in asked),
        reader="thread" if is_text else job.reader,
    )


def _answered(
    examples: Sequence[Example], asked: Sequence[_Asked], planner: JobPlanner, records: Iterable[Record]
) -> tuple[list[Outcome], dict[str, str], int]:
    """The outcomes of all examples whose pictures could be read, in the order of the examples.

    Also returns the other pictures by name, with the reason, and the number of questions that the model could not
    answer.
    """
    by_id: dict[str, Record] = {}
    for one_record in records:
        if one_record["error"] is None or one_record["id"] not in by_id:
            by_id[one_record["id"]] = one_record
    outcomes, unreadable, num_refused = dict[int, Outcome](), dict[str, str](), 0
    for one in asked:
        work, _ = planner.item(one.item)
        prefix = work.picture.digest if isinstance(work.picture, PictureReading) else ""
        for index, place in one.examples:
            example, key = examples[index], work.questions[place].tag.key
            # If a picture disappeared after the data were checked, its record has no digest.
            record = by_id.get(key.id(example.digest or prefix)) or by_id.get(key.id(""))
            if record is None:
                unreadable[example.item.label] = "it changed after the data were checked"
                continue
            error = record["error"]
            code, choice = error and error["code"], record["choice"]
            outcome = outcome_of(example, record["text"], choice=choice, error=code, shown=record["prompt"])
            if outcome is not None:
                outcomes[index] = outcome
            elif error is not None:
                unreadable[example.item.label] = error["message"]
            num_refused += error is not None and error["code"] in MODEL_ERRORS
    return [outcomes[index] for index in sorted(outcomes)], unreadable, num_refused


def _notes(
    job: EvaluationJob, data: EvaluationData, *, unreadable: Mapping[str, str], num_refused: int
) -> tuple[str, ...]:
    """Sentences for the reports."""
    split = "all examples" if data.split == ALL_SPLITS else f"split {data.split}"
    part = "" if job.data.limit is None else f", at most {job.data.limit:,} drawn with seed {job.data.seed}"
    named = ", ".join(map(shown_name, job.data.data))
    notes = [f"Data: {named}, {split}{part}; SHA-256 {data_digest(data.examples)[:16]}."]
    asked = model_questions_notes(data.model_questions, job.answering.spec)
    notes += [f"{sentence[0].upper()}{sentence[1:]}." for sentence in asked]
    if unreadable:
        names = ", ".join(map(shown_name, list(unreadable)[:_MOST_NAMED]))
        more = f" and {len(unreadable) - _MOST_NAMED:,} more" if len(unreadable) > _MOST_NAMED else ""
        notes.append(f"Pictures that could not be read and are left out: {len(unreadable):,} ({names}{more}).")
    if num_refused:
        notes.append(f"Examples that the model could not answer, which count as wrong: {num_refused:,}.")
    return tuple(notes)


def _write_reports(folder: Path, scores: Scores, comparison: Comparison | None, *, examples: Sequence[Example]) -> None:
    sources = {example.item.label: example.item.source for example in examples}
    pictures = [thumbnail_of(sources.get(one.outcome.picture)) for one in scores.worst]
    write_text(folder / SCORES, as_json(scores, comparison, pictures=pictures))
    write_text(folder / "scores.md", as_markdown(scores, comparison))
    write_text(folder / "scores.html", as_html(scores, comparison, pictures=pictures))
