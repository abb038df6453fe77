"""A job with the engine ray: this process lists the pictures, hands them out, and alone writes what comes back."""

import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

from app.deciding import Decider
from app.errors import Exit, UsageError
from app.jobs.desk import Desk
from app.jobs.interruption import Interruption
from app.jobs.job import Job
from app.jobs.run import open_decider, open_desk
from app.jobs.scribe import InputGoneError, Scribe
from app.records.folder import RecordStore, open_records
from app.records.index import RecordIndex
from app.records.manifest import RunManifest, new_run_id
from app.records.settings import record_settings
from app.report import versions
from app.scale.chunks import AnsweredChunk, Known, in_chunks, sizes
from app.scale.cluster import joined_cluster, machines
from app.scale.crew import IN_HAND, Crew
from app.scale.drive import Drive, loaded
from app.scale.inputs import check_all_inputs, count_all_inputs, read_all_inputs
from app.scale.options import RayOptions
from app.scale.pipeline import ReadingPipeline, prepare_context
from app.scale.places import num_reading_tasks, plan_places
from app.scale.reading import Reading
from app.scale.worker import LoadedModel
from app.spec import CaptionerSpec
from app.telling import EMBEDDED_NOTE, is_sample
from app.work import WorkItem


def run_ray_job(job: Job, options: RayOptions) -> int:
    """Answer every question about every picture on the machines of a Ray cluster; returns the exit code.

    As `run_job`: the same records, in the order in which they are ready. Raises what app/errors.py lists.
    """
    if job.profile is not None:
        raise UsageError("--profile measures one process", hint="leave --engine ray or --profile out")
    check_all_inputs(job.inputs)
    decider = open_decider(job)
    with ExitStack() as stack:
        file = None if job.out is None else stack.enter_context(open_records(job.out))
        where = stack.enter_context(joined_cluster(options))
        prepare_context()
        places = plan_places(machines(), device=job.spec.device, actors=options.actors)
        if not job.quiet:
            captioners = "1 captioner" if len(places) == 1 else f"{len(places)} captioners"
            print(f"{where}, {captioners}", file=sys.stderr)
        crew = Crew(job, places, os.getcwd())
        stack.callback(crew.stop)
        crew.start()
        first = _first_ready(crew)
        return _answer(job, crew, first=first, file=file, decider=decider)


def _answer(job: Job, crew: Crew, *, first: LoadedModel, file: RecordStore | None, decider: Decider) -> int:
    """The job, once a captioner has said what the model is."""
    run, num_captioners = new_run_id(), len(crew.places)
    desk = open_desk(job, first.info, spec=first.spec, run=run, file=file)
    manifest = None if file is None or not file.is_durable else _manifest(job, first, run=run, crew=crew)
    scribe = Scribe(job, desk, file=file, manifest=manifest, decider=decider, count=lambda: _count(job))
    known = _known(job, first, file)
    with ExitStack() as stack:
        stack.callback(scribe.close)
        for note in first.info.notes:
            scribe.say(f"note: {note}")
        interruption = stack.enter_context(Interruption())
        num_tasks = num_reading_tasks(machines(), num_captioners=num_captioners)
        pipeline = ReadingPipeline(
            _reading(job, first), known=known, num_tasks=num_tasks, ahead=IN_HAND * num_captioners
        )
        stack.enter_context(closing(pipeline))
        drive = Drive(crew, pipeline, desk, scribe, first=first, has_earlier=known is not None)
        chunk_sizes = sizes(_batch_size(first.spec), num_alike=IN_HAND * num_captioners)
        started = time.perf_counter()
        drive.run(
            in_chunks(_work(job, desk, scribe), chunk_sizes),
            stop=lambda: interruption.requested or scribe.gone is not None,
        )
        wall_s = time.perf_counter() - started
        scribe.summarise(wall_s, waited_s=wall_s * max(0.0, 1 - drive.busy_s / drive.ready_s) if drive.ready_s else 0.0)
        scribe.end_reason = "interrupted" if interruption.requested else "failed" if scribe.gone else "finished"
        if interruption.requested and job.out is not None:
            scribe.say("interrupted: the same command goes on where this one ended")
    if scribe.gone is not None:
        raise InputGoneError(scribe.gone)
    if interruption.requested:
        return Exit.INTERRUPTED
    return Exit.PICTURE_ERRORS if scribe.num_failed else Exit.OK


def _first_ready(crew: Crew) -> LoadedModel:
    """Wait for a captioner, and for what it says of the model. Raises what loading raised."""
    while True:
        for came in crew.wait(1.0):
            assert not isinstance(came, AnsweredChunk), "nothing was handed out yet"
            return loaded(came)


def _work(job: Job, desk: Desk, scribe: Scribe) -> Iterator[WorkItem]:
    is_noted = not job.spec.is_embedded
    for picture in read_all_inputs(job.inputs):
        if not is_noted and not is_sample(picture.source):
            scribe.say(EMBEDDED_NOTE)
            is_noted = True
        item, failures = desk.item(picture)
        for failure in failures:
            scribe.write(failure)
        if item.questions:
            yield item


def _count(job: Job) -> int | None:
    pictures = count_all_inputs(job.inputs)
    return None if pictures is None else pictures * len(job.questions)


def _known(job: Job, first: LoadedModel, file: RecordStore | None) -> Known | None:
    """What workers may leave out. Read once more: the desk's own index notes which records it has given away."""
    if file is None or not file.is_durable:
        return None
    index = RecordIndex(file.files)
    if not index:
        return None
    settings = record_settings(first.spec, info=first.info, sampling=job.sampling, choices=None)
    return Known(index=index, model_digest=first.info.digest, settings=settings, retry_errors=job.retry_errors)


def _reading(job: Job, first: LoadedModel) -> Reading:
    return Reading(
        spec=first.spec,
        size=first.image_size,
        kind=job.reader,
        timeout_s=job.picture_timeout_s,
        folder=os.getcwd(),
    )


def _batch_size(spec: CaptionerSpec) -> int:
    assert isinstance(spec.batch_size, int), "nothing is open in the spec of a loaded model"
    return spec.batch_size


def _manifest(job: Job, first: LoadedModel, *, run: str, crew: Crew) -> RunManifest:
    """As that of a job on one machine, and how many answered."""
    names = ("name", "device", "dtype", "operators", "context")
    resolved = dataclasses.asdict(first.spec) | {name: getattr(first.info, name) for name in names}
    asked = {
        "inputs": dataclasses.asdict(job.inputs),
        "questions": [dataclasses.asdict(question) for question in job.questions],
        "sampling": dataclasses.asdict(job.sampling),
        "engine": {"name": "ray", "captioners": len(crew.places)},
    }
    return RunManifest(run=run, spec=resolved, model_digest=first.info.digest, versions=versions(), job=asked)
