"""What a job opens before its first picture, on one machine or many: reader, planner, decider, manifest."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from llama_adapter.app.calibration.decider import Decider
from llama_adapter.app.calibration.file import read_calibration
from llama_adapter.app.captioning.captioner import Captioner, ModelInfo
from llama_adapter.app.captioning.work_items import WorkItem
from llama_adapter.app.inputs import PictureInput, count_inputs
from llama_adapter.app.inputs.archives import is_archive_name
from llama_adapter.app.inputs.patterns import is_pattern
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.jobs.job_planner import JobPlanner
from llama_adapter.app.jobs.questions import TemplateError, fill, is_template, picture_variables, questions_about
from llama_adapter.app.jobs.result_writer import ResultWriter
from llama_adapter.app.measuring.report import versions
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.records.folder import RecordStore
from llama_adapter.app.records.index import RecordIndex
from llama_adapter.app.records.manifest import RunManifest
from llama_adapter.app.terminal.wording import EMBEDDED_NOTE, is_sample
from llama_adapter.runtime.errors import UsageError


def open_decider(job: Job) -> Decider:
    """How texts say what was chosen. Raises UsageError where the job's choices are not those of its calibration."""
    calibration = None if job.calibration is None else read_calibration(job.calibration)
    decider = Decider.of(calibration, threshold=job.threshold, abstain=job.abstain)
    asked = {question.task.continuations for question in job.questions} - {()}
    if not decider.is_plain and not asked and not job.inputs.manifests:
        raise UsageError("--threshold, --abstain and --calibration decide between --choices, and there are none")
    for choices in asked:
        if calibration is not None and not calibration.fits(dict.fromkeys(choices)):
            raise UsageError(
                f"`{job.calibration}` is a calibration for the choices {', '.join(calibration.choices)}, and these are "
                f"{', '.join(choices)}"
            )
    return decider


def check_questions(job: Job, captioner: Captioner) -> None:
    """Raise PromptTooLongError, PromptError, ValueError or UsageError where a question could be put to no picture."""
    for question in job.questions:
        if not is_template(question):
            captioner.encode_prompt(question.prompt(captioner.info.default_prompt), question.task)


def open_planner(job: Job, info: ModelInfo, *, spec: CaptionerSpec, run: str, file: RecordStore | None) -> JobPlanner:
    """The planner of a job, which knows what the file of records holds; with `overwrite` the file is emptied.

    `info` and `spec` are those of the loaded model. Raises `RecordFileError`.
    """
    earlier = None
    if file is not None and file.is_durable:
        if job.overwrite:
            file.clear()
        else:
            earlier = RecordIndex(file.files)
    return JobPlanner(
        job.questions,
        spec=spec,
        info=info,
        sampling=job.sampling,
        run=run,
        earlier=earlier or None,
        retry_errors=job.retry_errors,
        needs_question=job.needs_question,
    )


def open_manifest(
    job: Job, info: ModelInfo, *, spec: CaptionerSpec, run: str, file: RecordStore | None, **about: Any
) -> RunManifest | None:
    """The manifest of a run, with nothing left open in the spec; `about` is what else there is to say of it."""
    if file is None or not file.is_durable:
        return None
    names = ("name", "device", "dtype", "operators", "context")
    resolved = dataclasses.asdict(spec) | {name: getattr(info, name) for name in names}
    asked = {
        "inputs": dataclasses.asdict(job.inputs),
        "questions": [dataclasses.asdict(question) for question in job.questions],
        "sampling": dataclasses.asdict(job.sampling),
        **about,
    }
    return RunManifest(run=run, spec=resolved, model_digest=info.digest, versions=versions(), job=asked)


def check_variables(job: Job) -> None:
    """Raise UsageError where a question names a variable that no picture of the job can have."""
    names = (*job.inputs.paths, *job.inputs.lists, *job.inputs.manifests)
    if job.inputs.lists or job.inputs.manifests or any(is_pattern(name) or is_archive_name(name) for name in names):
        return  # what these bring is known when it comes
    for question in job.questions:
        try:
            fill(question, picture_variables("", {}))
        except TemplateError as error:
            raise UsageError(str(error), hint=error.hint) from None


def tell_notes(
    job: Job, info: ModelInfo, writer: ResultWriter, decider: Decider, *, spec: CaptionerSpec, file: RecordStore | None
) -> None:
    """Say what is otherwise than a user may think: of the model, of a calibration, and of the place of the records."""
    if file is not None and file.is_durable and not file.is_locked:
        writer.say(f"note: the file system of `{file.path}` has no locks: no other run may write there meanwhile")
    if file is not None and file.repair == "dropped":
        writer.say(f"note: the last record in `{file.path}` was torn, as a crash leaves it, and was removed")
    for note in info.notes:
        writer.say(f"note: {note}")
    if job.spec.batch_size == "auto":
        writer.say(f"note: batch size {spec.batch_size}")
    asked = [question for question in job.questions if question.task.continuations and not is_template(question)]
    prompts = [question.shown(info.default_prompt) for question in asked]
    for note in decider.doubts(prompts=prompts, model_digests=[info.digest]):
        writer.say(note)


def work_of(
    job: Job, inputs: Iterable[PictureInput], planner: JobPlanner, writer: ResultWriter, *, stop: Callable[[], bool]
) -> Iterator[WorkItem]:
    """The work that the inputs mean, until `stop`; questions that cannot be put are answered here, with an error."""
    is_noted = not job.spec.is_embedded
    for picture in inputs:
        if stop():  # also where no input has a question that can be put, so that nobody else gets to look
            return
        writer.show_progress()
        if not is_noted and not is_sample(picture.source):
            writer.say(EMBEDDED_NOTE)
            is_noted = True
        item, failures = planner.item(picture)
        for failure in failures:
            writer.write(failure)
        if item.questions:
            yield item


def count_answers(job: Job, *, count: Callable[..., int | None] = count_inputs) -> int | None:
    """Answers of the whole job; None where that cannot be known before. `count` is `count_inputs`, or one like it."""
    return count(job.inputs, size=lambda picture: len(questions_about(picture.questions, common=job.questions)))
