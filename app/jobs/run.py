"""What `caption` and `ask` do on this machine: pictures in, answers out as they are ready. No flags: see cli.py."""

import dataclasses
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

from app.calibration.file import read_calibration
from app.captioner import Answer, Captioner, ModelInfo, WorkItem
from app.clock import StageClock
from app.deciding import Decider
from app.errors import Exit, UsageError
from app.inputs import check_inputs, count_inputs, read_inputs
from app.jobs.desk import Desk
from app.jobs.interruption import Interruption
from app.jobs.job import Job
from app.jobs.scribe import InputGoneError, Scribe
from app.reading.isolated import IsolatedReader
from app.reading.reader import PictureReader, Reader
from app.records.folder import RecordStore, open_records
from app.records.index import RecordIndex
from app.records.manifest import RunManifest, new_run_id
from app.report import Report, make_report, versions
from app.spec import CaptionerSpec
from app.telling import EMBEDDED_NOTE, is_sample
from llm.runtime.backend import EAGER


def run_job(job: Job) -> int:
    """Answer every question about every picture; returns the exit code.

    Interrupted once, it finishes the pictures it has begun. Raises what app/errors.py lists.
    """
    check_inputs(job.inputs)
    decider = open_decider(job)
    with ExitStack() as stack:
        # Before the model is loaded, which may take minutes: a place that cannot be written shows at once.
        file = None if job.out is None else stack.enter_context(open_records(job.out))
        captioner = stack.enter_context(Captioner.load(**dataclasses.asdict(job.spec)))
        check_questions(job, captioner)
        reader = stack.enter_context(closing(open_reader(job, captioner.spec, size=captioner.image_size)))
        run = new_run_id()
        desk = open_desk(job, captioner.info, spec=captioner.spec, run=run, file=file)
        manifest = None if file is None or not file.is_durable else _manifest(job, captioner, run=run)
        scribe = Scribe(job, desk, file=file, manifest=manifest, decider=decider, count=lambda: _count(job))
        stack.callback(scribe.close)
        clock = StageClock() if job.profile is None else captioner.profile_clock(waits=job.profile == "wait")
        interruption = stack.enter_context(Interruption())
        _tell_and_warm_up(job, captioner, scribe)
        started = time.perf_counter()
        events = captioner.run(
            _work(job, desk, scribe),
            sampling=job.sampling,
            clock=clock,
            reader=reader,
            wants=desk.wants,
            stop=lambda: interruption.requested or scribe.gone is not None,
        )
        for event in events:
            if isinstance(event, Answer):
                scribe.write(event)
        wall_s = time.perf_counter() - started
        scribe.summarise(wall_s, waited_s=clock.seconds["read"])
        scribe.end_reason = "interrupted" if interruption.requested else "failed" if scribe.gone else "finished"
        if interruption.requested and job.out is not None:
            scribe.say("interrupted: the same command goes on where this one ended")
    if job.profile is not None:
        print(_report(job, captioner, scribe, clock, wall_s).format_table(), file=sys.stderr)
    if scribe.gone is not None:
        raise InputGoneError(scribe.gone)
    if interruption.requested:
        return Exit.INTERRUPTED
    return Exit.PICTURE_ERRORS if scribe.num_failed else Exit.OK


def open_decider(job: Job) -> Decider:
    """How texts say what was chosen. Raises UsageError where the job's choices are not those of its calibration."""
    calibration = None if job.calibration is None else read_calibration(job.calibration)
    decider = Decider.of(calibration, threshold=job.threshold, abstain=job.abstain)
    asked = {question.choices for question in job.questions if question.choices is not None}
    if not decider.is_plain and not asked and not job.inputs.manifests:
        raise UsageError("--threshold, --abstain and --calibration decide between --choices, and there are none")
    for choices in asked:
        if calibration is not None and not calibration.fits(dict.fromkeys(choices)):
            raise UsageError(
                f"`{job.calibration}` is a calibration for the choices {', '.join(calibration.choices)}, and these are "
                f"{', '.join(choices)}"
            )
    return decider


def open_reader(job: Job, spec: CaptionerSpec, *, size: int) -> Reader:
    """What reads the job's pictures, for an encoder that sees squares of `size` pixels and has the `spec`."""
    if job.reader == "thread":
        return PictureReader(spec, size=size)
    reader = IsolatedReader(spec, size=size, timeout_s=job.picture_timeout_s)
    reader.start()
    return reader


def check_questions(job: Job, captioner: Captioner) -> None:
    """Raise PromptTooLongError, PromptError, ValueError or UsageError where a question could be put to no picture."""
    for question in job.questions:
        if not question.is_template:
            captioner.check_prompt(question.prompt(captioner.info.default_prompt), question.choices)


def open_desk(job: Job, info: ModelInfo, *, spec: CaptionerSpec, run: str, file: RecordStore | None) -> Desk:
    """The desk of a job, which knows what the file of records holds; with `overwrite` the file is emptied.

    `info` and `spec` are those of the loaded model. Raises `RecordFileError`.
    """
    earlier = None
    if file is not None and file.is_durable:
        if job.overwrite:
            file.clear()
        else:
            earlier = RecordIndex(file.files)
    return Desk(
        job.questions,
        spec=spec,
        info=info,
        sampling=job.sampling,
        run=run,
        earlier=earlier or None,
        retry_errors=job.retry_errors,
    )


def _work(job: Job, desk: Desk, scribe: Scribe) -> Iterator[WorkItem]:
    is_noted = not job.spec.is_embedded
    for picture in read_inputs(job.inputs):
        if not is_noted and not is_sample(picture.source):
            scribe.say(EMBEDDED_NOTE)
            is_noted = True
        item, failures = desk.item(picture)
        for failure in failures:
            scribe.write(failure)
        if item.questions:
            yield item


def _count(job: Job) -> int | None:
    """Answers of the whole job, about; None where that cannot be known before."""
    pictures = count_inputs(job.inputs)
    return None if pictures is None else pictures * len(job.questions)


def _tell_and_warm_up(job: Job, captioner: Captioner, scribe: Scribe) -> None:
    for note in captioner.info.notes:
        scribe.say(f"note: {note}")
    captioner.back_off.tell = lambda text: scribe.say(f"note: {text}")
    question = job.questions[0]
    if captioner.info.mode != EAGER and question.choices is None:
        prompt = question.prompt(captioner.info.default_prompt)
        warm_up = captioner.warm_up(prompt, max_new_tokens=job.sampling.max_new_tokens)
        scribe.say(f"warm-up: {warm_up.programs} programs ready in {warm_up.seconds:.1f} s")


def _manifest(job: Job, captioner: Captioner, *, run: str) -> RunManifest:
    """With nothing left open in the spec."""
    info = captioner.info
    resolved = {
        **dataclasses.asdict(captioner.spec),
        "name": info.name,
        "device": info.device,
        "dtype": info.dtype,
        "operators": info.operators,
        "context": info.context,
    }
    asked = {
        "inputs": dataclasses.asdict(job.inputs),
        "questions": [dataclasses.asdict(question) for question in job.questions],
        "sampling": dataclasses.asdict(job.sampling),
    }
    return RunManifest(run=run, spec=resolved, model_digest=info.digest, versions=versions(), job=asked)


def _report(job: Job, captioner: Captioner, scribe: Scribe, clock: StageClock, wall_s: float) -> Report:
    return make_report(
        scribe.tally,
        stages_s=clock.seconds,
        device_stages_s=clock.read_device_seconds(),
        wall_s=wall_s,
        model=captioner.info,
        batch_size=captioner.batch_size,
        synchronised=job.profile == "wait",
    )
