"""What `caption` and `ask` do on this machine: pictures in, answers out as they are ready. No flags: see app/cli."""

import time
from contextlib import ExitStack, closing

from llama_adapter.app.captioning.captioner import Answer, Captioner
from llama_adapter.app.captioning.stage_clock import StageClock
from llama_adapter.app.inputs import check_inputs, may_wait, read_inputs
from llama_adapter.app.jobs.interruption import Interruption
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.jobs.opening import (
    check_questions,
    check_variables,
    count_answers,
    open_decider,
    open_manifest,
    open_planner,
    tell_notes,
    work_of,
)
from llama_adapter.app.jobs.result_writer import ResultWriter
from llama_adapter.app.measuring.report import Report
from llama_adapter.app.reading.isolated import open_reader
from llama_adapter.app.records.folder import open_records
from llama_adapter.app.records.manifest import new_run_id
from llama_adapter.app.terminal.stderr_lines import say
from llama_adapter.runtime.devices.backend import EAGER


def run_job(job: Job) -> int:
    """Answer every question about every picture; returns the exit code.

    Interrupted once, it finishes the pictures it has begun. Raises what runtime/problems.py lists.
    """
    check_inputs(job.inputs, need_questions=job.lacks_question)
    check_variables(job)
    decider = open_decider(job)
    with ExitStack() as stack:
        # Before the model is loaded, which may take minutes: a place that cannot be written shows at once.
        file = None if job.out is None else stack.enter_context(open_records(job.out))
        captioner = stack.enter_context(Captioner.from_spec(job.spec))
        check_questions(job, captioner)
        info, spec, run = captioner.info, captioner.spec, new_run_id()
        reader = open_reader(job.reader, spec, size=captioner.image_size, timeout_s=job.picture_timeout_s)
        stack.enter_context(closing(reader))
        planner = open_planner(job, info, spec=spec, run=run, file=file)
        manifest = open_manifest(job, info, spec=spec, run=run, file=file)
        writer = stack.enter_context(
            ResultWriter(job, planner, file=file, manifest=manifest, decider=decider, count=lambda: count_answers(job))
        )
        clock = StageClock() if job.profile is None else captioner.profile_clock(waits=job.profile == "wait")
        interruption = stack.enter_context(Interruption())
        tell_notes(job, info, writer, decider, spec=spec, file=file)
        _warm_up(job, captioner, writer)
        stop = lambda: interruption.requested or writer.has_to_stop  # noqa: E731 - an argument, twice
        started = time.perf_counter()
        events = captioner.run(
            work_of(job, read_inputs(job.inputs), planner, writer, stop=stop),
            sampling=job.sampling,
            clock=clock,
            reader=reader,
            wants=planner.wants,
            may_wait=may_wait(job.inputs),
            stop=stop,
        )
        # However this ends, the engine is left before the reader and the captioner are closed.
        for event in stack.enter_context(closing(events)):
            if isinstance(event, Answer):
                writer.write(event)
        wall_s = time.perf_counter() - started
        writer.finish(wall_s, waited_s=clock.seconds["read"], is_interrupted=interruption.requested)
    if job.profile is not None:
        say(_report(job, captioner, writer, clock, wall_s).format_table())
    return writer.exit_code()


def _warm_up(job: Job, captioner: Captioner, writer: ResultWriter) -> None:
    """Compile what has to be, before the first picture waits for it; shortages of memory are told from now on."""
    captioner.oom_retry.tell = lambda text: writer.say(f"note: {text}")
    question = job.questions[0]
    if captioner.info.mode != EAGER and not question.task.continuations:
        prompt = question.prompt(captioner.info.default_prompt)
        warm_up = captioner.warm_up(prompt, max_new_tokens=job.sampling.max_new_tokens)
        writer.say(f"warm-up: {warm_up.programs} programs ready in {warm_up.seconds:.1f} s")


def _report(job: Job, captioner: Captioner, writer: ResultWriter, clock: StageClock, wall_s: float) -> Report:
    return Report(
        tally=writer.tally,
        stages_s=clock.seconds,
        device_stages_s=clock.read_device_seconds(),
        wall_s=wall_s,
        model=captioner.info,
        batch_size=captioner.batch_size,
        synchronised=job.profile == "wait",
    )
