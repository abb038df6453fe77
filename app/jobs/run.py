"""`caption`, `ask` and `generate` from top to bottom: read pictures or prompts, and write answers as they are ready."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial

from llama_adapter.app.captioning.decisions.calibration import read_calibration
from llama_adapter.app.captioning.decisions.decider import Decider
from llama_adapter.app.captioning.decisions.rule import Rule
from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.captioning.tasks.task import task_settings
from llama_adapter.app.captioning.work_items import WorkItem
from llama_adapter.app.jobs.interruption import interruptible
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.jobs.job_planner import JobPlanner
from llama_adapter.app.jobs.questions import check_variables, count_answers, is_template
from llama_adapter.app.jobs.records.file import RecordWriter, open_records
from llama_adapter.app.jobs.records.index import RecordIndex
from llama_adapter.app.jobs.records.manifest import (
    RunManifest,
    manifest_path,
    new_run_id,
    read_manifest,
    write_manifest,
)
from llama_adapter.app.jobs.report import versions
from llama_adapter.app.jobs.result_writer import ResultWriter
from llama_adapter.app.jobs.runner import LocalRunner, Runner
from llama_adapter.app.jobs.wording import EMBEDDED_NOTE, EMBEDDED_TEXT_NOTE, is_sample
from llama_adapter.app.models.spec import AUTO, ModelInfo
from llama_adapter.app.pictures.inputs import check_inputs, count_in_sub_folders, read_inputs
from llama_adapter.app.pictures.inputs.items import LeftOut
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.terminal.stderr_lines import say
from llama_adapter.runtime.text import shown_name

_MOST_COUNTED, _MOST_NAMED = 100_000, 3  # pictures and folders in a note


def run_job(job: Job, runner: Runner | None = None) -> int:
    """Answer every question about every picture; returns the exit code.

    `runner` is `LocalRunner` by default. After the first interrupt, the job finishes the pictures it has begun. Raises
    the errors that runtime/problems.py lists.
    """
    runner = runner or LocalRunner()
    need_questions = job.needs_question and job.questions[0].is_caption  # the job has none for pictures without one
    check_inputs(job.inputs, need_questions=need_questions, addresses=runner.reads_addresses)
    check_variables(job)
    decider = _open_decider(job)
    with ExitStack() as stack:
        file, runs = None, list[RunManifest]()
        if job.out is not None:
            # Before the model, which may take minutes to load, so that an unwritable path or a broken manifest fails
            # immediately.
            file = stack.enter_context(open_records(job.out))
            runs = read_manifest(job.out) if file.is_durable else []
        stack.enter_context(runner.open(job))
        planner = JobPlanner(job, spec=runner.spec, info=runner.info, earlier=_read_earlier(job, file))
        manifest = _begin_manifest(job, runner) if file is not None and file.is_durable else None
        count = partial(count_answers, job, addresses=runner.reads_addresses)
        writer = stack.enter_context(
            ResultWriter(job, planner, file=file, manifest=manifest, decider=decider, count=count)
        )
        interruption = stack.enter_context(interruptible("finishing what is begun; Ctrl-C again stops at once"))

        def stop() -> bool:
            return interruption.is_asked or writer.problem is not None

        folders, left_out = dict[str, None](), LeftOut()
        items = _plan(job, runner, planner, writer, folders=folders, left_out=left_out, stop=stop)
        events = stack.enter_context(closing(runner.answer(items, planner, say=writer.say, stop=stop)))
        # Not before: a model that cannot answer the questions may be loaded by `answer`.
        _say_notes(job, runner, writer, decider, file=file, continued=runs if planner.earlier is not None else [])
        started = time.perf_counter()
        for event in events:
            if isinstance(event, Answer):
                writer.write(event)
            else:
                writer.show_piece(event)
        wall_s = time.perf_counter() - started
        writer.finish(wall_s, waited_s=runner.waited_s(wall_s), is_interrupted=interruption.is_asked)
        if job.paddlenlp_out is not None and file is not None:
            from llama_adapter.app.jobs.exports.outputs import write_targets

            write_targets(job.paddlenlp_out, planner.targets, records=file.files)
        if not stop() and (note := _passed_over(job, folders)):
            writer.say(note)
        if left_out:
            writer.say(f"note: left out: {left_out.note()}")
    if job.profile is not None and isinstance(runner, LocalRunner):
        say(runner.report(writer.tally, wall_s))
    return writer.exit_code()


def _open_decider(job: Job) -> Decider:
    """The decider that text output shows. Raises UsageError if the calibration is for other choices than the job's."""
    rule = Rule.from_flags(job.threshold, job.abstain)
    calibration = None if job.calibration is None else read_calibration(job.calibration)
    asked = {question.task.continuations for question in job.questions} - {()}
    if (rule or calibration) and not asked and not job.inputs.manifests:
        raise UsageError("--threshold, --abstain and --calibration decide between --choices, and there are none")
    for choices in asked:
        if calibration is not None and not calibration.fits(dict.fromkeys(choices)):
            raise UsageError(
                f"`{job.calibration}` is a calibration for the choices {', '.join(calibration.choices)}, and these are "
                f"{', '.join(choices)}"
            )
    return Decider(rule=rule, calibration=calibration)


def _read_earlier(job: Job, file: RecordWriter | None) -> RecordIndex | None:
    """The records of earlier runs; with `overwrite` they are deleted. Raises `RecordFileError`."""
    if file is None or not file.is_durable:
        return None
    if job.overwrite:
        file.clear()
        return None
    return RecordIndex(file.files) or None


def _begin_manifest(job: Job, runner: Runner) -> RunManifest:
    """Write the manifest of this run, and return it. Raises OSError and `RecordFileError`."""
    assert job.out is not None, "the caller asks"
    names = ("name", "device", "dtype", "operators", "context")
    resolved = dataclasses.asdict(runner.spec) | {name: getattr(runner.info, name) for name in names}
    asked = {
        "inputs": dataclasses.asdict(job.inputs),
        "questions": [
            {"instruction": question.instruction, "input": question.input, "raw": question.raw}
            | task_settings(question.task)
            for question in job.questions
        ],
        "sampling": job.sampling.settings(),
        **({"text_prefix": runner.info.text_prefix(job.text_prefix)} if job.inputs.is_text else {}),
        **runner.about,
    }
    manifest = RunManifest(
        spec=resolved,
        model_digest=runner.info.digest,
        versions=versions(),
        job=asked,
        settings=dict(job.settings),
        run=new_run_id(),
    )
    write_manifest(job.out, manifest=manifest)
    return manifest


def _other_dtype(runs: Sequence[RunManifest], info: ModelInfo) -> str:
    """The dtype of the last of these runs that had this model; "" if one had the present dtype."""
    dtypes = [str(run.spec.get("dtype")) for run in runs if run.model_digest == info.digest]
    return dtypes[-1] if dtypes and info.dtype not in dtypes else ""


def _say_notes(
    job: Job,
    runner: Runner,
    writer: ResultWriter,
    decider: Decider,
    *,
    file: RecordWriter | None,
    continued: Sequence[RunManifest],
) -> None:
    """Print notes on what users may not expect of the record file, the model and the calibration.

    `continued` are the earlier runs whose records count.
    """
    if file is not None and file.is_durable and not file.is_locked:
        writer.say(f"note: the file system of `{file.path}` has no locks: do not start another run that writes there")
    if file is not None and file.repair == "dropped":
        writer.say(f"note: the last record in `{file.path}` was torn, as a crash leaves it, and was removed")
    if file is not None and not (job.overwrite or continued) and os.path.isdir(str(job.out)):
        others = sorted(set(file.path.parent.glob("*.jsonl")).difference(file.files))
        if left := next((shown_name(str(path)) for path in others if manifest_path(path).exists()), ""):
            writer.say(
                f"note: records in part-00000.jsonl and so on count here, not those in `{left}`; to continue them, "
                "pass the --out of their run"
            )
    for note in runner.info.notes:
        writer.say(f"note: {note}")
    if job.spec.dtype == AUTO and (other := _other_dtype(continued, runner.info)):
        writer.say(
            f"note: the records in `{job.out}` were computed in {other}, so this run answers their questions again in "
            f"{runner.info.dtype}; --dtype {other} continues them"
        )
    if job.has_texts and job.spec.is_embedded:
        writer.say(EMBEDDED_TEXT_NOTE)
    if job.spec.batch_size == "auto":
        writer.say(f"note: batch size {runner.spec.batch_size}")
    asked = [question for question in job.questions if question.task.continuations and not is_template(question)]
    prompts = [question.shown(runner.info.default_prompt) for question in asked]
    for note in decider.doubts(prompts=prompts, model_digests=[runner.info.digest]):
        writer.say(note)


def _plan(
    job: Job,
    runner: Runner,
    planner: JobPlanner,
    writer: ResultWriter,
    *,
    folders: dict[str, None],
    left_out: LeftOut,
    stop: Callable[[], bool],
) -> Iterator[WorkItem]:
    """Yield the work items of the inputs until `stop` returns True; questions that cannot be asked fail here.

    The names of folders in which pictures were found are added to `folders`, and what is left out to `left_out`.
    """
    is_noted = not job.spec.is_embedded or job.inputs.is_text or (job.is_encoding and job.spec.encoder is not None)
    read = partial(read_inputs, job.inputs, addresses=runner.reads_addresses, left_out=left_out)
    for picture in read() if job.items is None else job.items:
        if stop():  # the runner cannot check this while no input has a question that can be asked
            return
        writer.show_progress()
        if picture.found_in and picture.root == picture.found_in[-1]:
            folders.setdefault(picture.found_in[-1])
        if not is_noted and picture.source is not None and not is_sample(picture.source):
            writer.say(EMBEDDED_NOTE)
            is_noted = True
        item, failures = planner.item(picture)
        for failure in failures:
            writer.write(failure)
        if item.questions:
            yield item


def _passed_over(job: Job, folders: Mapping[str, None]) -> str:
    """A note on pictures in sub-folders that were not searched; "" if there are none."""
    if job.inputs.recursive or job.inputs.limit is not None or job.items is not None:
        return ""
    found: dict[str, int] = {}
    for folder in folders:
        left = _MOST_COUNTED - sum(found.values())
        if number := count_in_sub_folders(folder, searched=folders, at_most=left):
            found[folder] = number
    if not found:
        return ""
    number = sum(found.values())
    named = ", ".join(f"`{shown_name(folder)}`" for folder in list(found)[:_MOST_NAMED])
    more = ", ..." if len(found) > _MOST_NAMED else ""
    least = " or more" if number == _MOST_COUNTED else ""
    were = "picture was" if number == 1 else "pictures were"
    return f"note: {number:,}{least} {were} left out in sub-folders of {named}{more}; --recursive includes them"
