"""A job with the engine ray: this process lists the pictures, hands them out, and alone writes what comes back."""

import os
import time
from contextlib import ExitStack, closing

from llama_adapter.app.calibration.decider import Decider
from llama_adapter.app.jobs.interruption import Interruption
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.jobs.opening import (
    check_variables,
    count_answers,
    open_decider,
    open_manifest,
    open_planner,
    tell_notes,
    work_of,
)
from llama_adapter.app.jobs.result_writer import ResultWriter
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.records.folder import RecordStore, open_records
from llama_adapter.app.records.index import RecordIndex
from llama_adapter.app.records.manifest import new_run_id
from llama_adapter.app.records.settings import record_settings
from llama_adapter.app.scale.actors import IN_HAND, Crew
from llama_adapter.app.scale.chunks import AnsweredChunk, Known, in_chunks, sizes
from llama_adapter.app.scale.cluster import joined_cluster, machines
from llama_adapter.app.scale.drive import Drive, loaded
from llama_adapter.app.scale.inputs import check_all_inputs, count_all_inputs, read_all_inputs
from llama_adapter.app.scale.last_words import last_words
from llama_adapter.app.scale.options import RayOptions
from llama_adapter.app.scale.pipeline import ReadingPipeline, prepare_context
from llama_adapter.app.scale.places import num_reading_tasks, plan_places
from llama_adapter.app.scale.reading import Reading
from llama_adapter.app.scale.worker import LoadedModel
from llama_adapter.app.terminal.stderr_lines import say
from llama_adapter.runtime.errors import UsageError


def run_ray_job(job: Job, options: RayOptions) -> int:
    """Answer every question about every picture on the machines of a Ray cluster; returns the exit code.

    As `run_job`: the same records, in the order in which they are ready. Raises what runtime/problems.py lists.
    """
    if job.profile is not None:
        raise UsageError("--profile measures one process", hint="leave --engine ray or --profile out")
    check_all_inputs(job.inputs, need_questions=job.lacks_question)
    check_variables(job)
    decider = open_decider(job)
    with ExitStack() as stack:
        file = None if job.out is None else stack.enter_context(open_records(job.out))
        stack.enter_context(last_words(job))
        where = stack.enter_context(joined_cluster(options))
        prepare_context()
        places = plan_places(machines(), device=job.spec.device, actors=options.actors)
        if not job.quiet:
            captioners = "1 captioner" if len(places) == 1 else f"{len(places)} captioners"
            say(f"{where}, {captioners}")
        crew = Crew(job, places, os.getcwd())
        stack.callback(crew.stop)
        crew.start()
        first = _first_ready(crew)
        return _answer(job, crew, first=first, file=file, decider=decider)


def _answer(job: Job, crew: Crew, *, first: LoadedModel, file: RecordStore | None, decider: Decider) -> int:
    """The job, once a captioner has said what the model is."""
    run, num_captioners = new_run_id(), len(crew.places)
    planner = open_planner(job, first.info, spec=first.spec, run=run, file=file)
    engine = {"name": "ray", "captioners": num_captioners}
    manifest = open_manifest(job, first.info, spec=first.spec, run=run, file=file, engine=engine)
    known = _known(job, first, file)
    with ExitStack() as stack:
        writer = stack.enter_context(
            ResultWriter(
                job,
                planner,
                file=file,
                manifest=manifest,
                decider=decider,
                count=lambda: count_answers(job, count=count_all_inputs),
            )
        )
        tell_notes(job, first.info, writer, decider, spec=first.spec, file=file)
        interruption = stack.enter_context(Interruption())
        num_tasks = num_reading_tasks(machines(), num_captioners=num_captioners)
        pipeline = ReadingPipeline(
            _reading(job, first), known=known, num_tasks=num_tasks, ahead=IN_HAND * num_captioners
        )
        stack.enter_context(closing(pipeline))
        drive = Drive(crew, pipeline, planner, writer, first=first, has_earlier=known is not None)
        chunk_sizes = sizes(_batch_size(first.spec), num_alike=IN_HAND * num_captioners)
        stop = lambda: interruption.requested or writer.has_to_stop  # noqa: E731 - an argument, twice
        started = time.perf_counter()
        work = work_of(job, read_all_inputs(job.inputs), planner, writer, stop=stop)
        drive.run(in_chunks(work, chunk_sizes), stop=stop)
        wall_s = time.perf_counter() - started
        waited_s = wall_s * max(0.0, 1 - drive.busy_s / drive.ready_s) if drive.ready_s else 0.0
        writer.finish(wall_s, waited_s=waited_s, is_interrupted=interruption.requested)
    return writer.exit_code()


def _first_ready(crew: Crew) -> LoadedModel:
    """Wait for a captioner, and for what it says of the model. Raises what loading raised."""
    while True:
        for came in crew.wait(1.0):
            assert not isinstance(came, AnsweredChunk), "nothing was handed out yet"
            return loaded(came)


def _known(job: Job, first: LoadedModel, file: RecordStore | None) -> Known | None:
    """What workers may leave out. Read once more: the planner's own index notes which records it has given away."""
    if file is None or not file.is_durable:
        return None
    index = RecordIndex(file.files)
    if not index:
        return None
    settings = record_settings(first.spec, info=first.info, sampling=job.sampling)
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
