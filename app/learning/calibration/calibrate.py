"""`ask --calibrate`: computes a calibration and its figures from labelled pictures."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import cast

import numpy as np

from llama_adapter.app.captioning.captioner import Answer, Captioner
from llama_adapter.app.captioning.decisions.calibration import Calibration, write_calibration
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.jobs.records.record import recorded_choice
from llama_adapter.app.learning.calibration.fitting import Examples, calibrate
from llama_adapter.app.learning.calibration.report import Mistake, format_calibration, write_plot
from llama_adapter.app.learning.evaluating.data import ask_stored, model_questions_notes
from llama_adapter.app.learning.evaluating.outcomes import question_of, require_questions, work_items
from llama_adapter.app.learning.labelled.example import Example, shown_problems
from llama_adapter.app.learning.labelled.reading import read_examples
from llama_adapter.app.learning.labelled.rows import SPLITS, Columns
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.models.stream_model import stored_questions
from llama_adapter.app.pictures.inputs import InputSpec, read_inputs
from llama_adapter.app.pictures.inputs.fields import PICTURE_COLUMNS, named
from llama_adapter.app.pictures.reading.isolated import open_reader
from llama_adapter.app.pictures.reading.reader import Reader
from llama_adapter.app.pictures.reading.spec import DEFAULT_PICTURE_TIMEOUT_S, ReaderKind
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.atomic_write import refuse_to_replace, require_place
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.plots import check_plot
from llama_adapter.runtime.terminal.stderr_lines import say, say_count
from llama_adapter.runtime.text import shown_name


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationJob:
    """One run of `ask --calibrate`, as plain values."""

    spec: CaptionerSpec
    calibrate: str  # labelled pictures: a table, a folder of folders by class, ...
    calibration_out: str
    choices: tuple[str, ...]
    question: str | None = None  # None: each example's own, or the one that the model stores
    input: str | None = None
    pictures: tuple[str, ...] = ()  # use only these pictures of the table; empty: all
    recursive: bool = False
    target_precision: float = 0.95
    reader: ReaderKind = "process"
    picture_timeout_s: float = DEFAULT_PICTURE_TIMEOUT_S
    plot: str | None = None
    force: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.target_precision <= 1.0:
            raise ValueError(f"target_precision must be above 0 and at most 1, got {self.target_precision}")


def run_calibration(job: CalibrationJob) -> int:
    """Ask about every labelled picture, fit the calibration, and print its figures on stdout. Returns the exit code.

    Raises InputsError and UsageError for unusable tables and files, and the errors that runtime/problems.py lists.
    """
    labelled = _chosen(job, read_labelled(job.calibrate, choices=job.choices))
    outputs = [Path(path) for path in (job.calibration_out, job.plot) if path is not None]
    refuse_to_replace(outputs, force=job.force, other=", or name another file as --calibration-out or --plot")
    require_place(job.calibration_out)
    if job.plot is not None:
        check_plot(job.plot)
    questions = [question_of(one, question=job.question, input=job.input) for one in labelled]
    with Captioner.from_spec(job.spec) as captioner:
        default, digest = captioner.info.default_prompt, captioner.info.digest
        for question in dict.fromkeys(questions):
            captioner.encode_prompt(question.prompt(default), question.task)
        pixels, timeout_s = captioner.pixels, job.picture_timeout_s
        with closing(open_reader(job.reader, captioner.spec.pictures, pixels=pixels, timeout_s=timeout_s)) as reader:
            found = dict(_ask(job, captioner, labelled, questions, reader=reader))
    answered = [(one, *found[index]) for index, one in enumerate(labelled) if index in found]
    num_unreadable = len(labelled) - len(answered)
    if not answered:
        say(f"error: none of the {num_unreadable} labelled pictures was answered")
        return ExitCode.FAILED
    shown = {question.shown(default) for question in questions}
    right = [job.choices.index(max(one.answers, key=choice.__getitem__)) for one, _, choice in answered]
    calibration = calibrate(
        Examples(
            probabilities_NC=np.array([[choice[name] for name in job.choices] for _, _, choice in answered]),
            labels_N=np.array(right, dtype=np.int64),
            groups_N=np.unique([digest for _, digest, _ in answered], return_inverse=True)[1],
        ),
        choices=job.choices,
        question=shown.pop() if len(shown) == 1 else None,
        model_digest=digest,
        target_precision=job.target_precision,
        num_unreadable=num_unreadable,
    )
    write_calibration(calibration, job.calibration_out)
    if job.plot is not None:
        write_plot(calibration, job.plot)
    print(format_calibration(calibration, mistakes=_mistakes(answered, calibration)))
    return ExitCode.PICTURE_ERRORS if num_unreadable else ExitCode.OK


def read_labelled(path: str, *, choices: tuple[str, ...]) -> list[Example]:
    """The labelled pictures of a table, a folder, an archive or a known data set, without duplicates.

    Whether the pictures exist is not checked. Notes on the data are printed. Raises InputsError, which lists the errors
    in the data, and OSError.
    """
    found = read_examples(path, columns=Columns(choices=choices), digests=False, looks=False)
    for example in found.examples:
        if example.item.source is None:
            found.refuse(example.place, f"it has no picture in a column {named(PICTURE_COLUMNS)}")
    if num_learned := sum(one.split == SPLITS[0] for one in found.examples):
        reason = f"examples of the split train: {num_learned:,}; a threshold from pictures that the model learned"
        found.warn(path, f"{reason} promises too much, so name a table of others, such as a run's validation.jsonl")
    found.require_sound(path)
    for line in shown_problems(found.problems):
        say(f"note: {line}")
    return found.examples


def _chosen(job: CalibrationJob, labelled: list[Example]) -> list[Example]:
    """The selected rows of the table. Those without a question get the one that the model stores, as in `eval`."""
    if job.question is None and any(one.question.instruction is None for one in labelled):
        asked = ask_stored(labelled, stored_questions(job.spec))
        for note in () if job.quiet else model_questions_notes(asked, job.spec):
            say(f"note: {note}")
        require_questions([one for one in labelled if one.question.instruction is None], count=len(labelled))
    if job.pictures:
        inputs = read_inputs(InputSpec(paths=job.pictures, recursive=job.recursive))
        # The label of a file is its path, and that of an archive's member is the archive's path and its name.
        places = {os.path.realpath(one.label) for one in inputs}
        chosen = [one for one in labelled if os.path.realpath(one.item.label) in places]
        if not chosen:
            raise UsageError(
                f"None of these pictures is in `{job.calibrate}`", hint="name no pictures to use the whole table"
            )
        if not job.quiet:
            say(f"note: {len(chosen)} of {len(labelled)} labelled pictures are used")
        return chosen
    return labelled


def _ask(
    job: CalibrationJob,
    captioner: Captioner,
    labelled: Sequence[Example],
    questions: Sequence[Question],
    *,
    reader: Reader,
) -> Iterator[tuple[int, tuple[str, dict[str, float]]]]:
    """Yield the index, the picture's digest and the probabilities of each answered row. A picture is one item."""
    num_done = 0
    items = work_items(captioner, labelled, questions)
    for event in captioner.run(items, sampling=SamplingParams(), reader=reader):
        if not isinstance(event, Answer):
            continue
        num_done += 1
        if event.error is not None:
            say(f"error: {event.error.message}")
        # Rounded as in records, because calibrations are applied to records.
        elif (choice := recorded_choice(event)) is not None and None not in choice.values():
            yield event.index, (event.digest, cast(dict[str, float], choice))
        if not job.quiet and (num_done % 64 == 0 or num_done == len(labelled)):
            say_count(num_done, len(labelled), "answered")


def _mistakes(answered: Sequence[tuple[Example, str, dict[str, float]]], calibration: Calibration) -> list[Mistake]:
    """The wrong answers, most confident first."""
    mistakes = []
    for one, _, choice in answered:
        scaled, label = calibration.apply(choice), max(one.answers, key=choice.__getitem__)
        best = max(scaled, key=lambda name: scaled[name])
        if best != label:
            picture, probability = shown_name(one.item.label), scaled[best]
            mistakes.append(Mistake(picture=picture, answer=best, label=label, probability=probability, line=one.line))
    return sorted(mistakes, key=lambda mistake: -mistake.probability)
