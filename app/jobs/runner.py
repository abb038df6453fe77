"""Runners turn the items of a job into answers: `LocalRunner` in this process, `app/jobs/clusters` with Ray."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import Any, Protocol

from llama_adapter.app.captioning.captioner import Captioner, Event
from llama_adapter.app.captioning.stage_clock import StageClock
from llama_adapter.app.captioning.work_items import WorkItem
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.jobs.job_planner import JobPlanner
from llama_adapter.app.jobs.questions import is_template
from llama_adapter.app.jobs.report import Report, Tally
from llama_adapter.app.models.spec import CaptionerSpec, ModelInfo
from llama_adapter.app.pictures.inputs import may_wait
from llama_adapter.app.pictures.reading.isolated import open_reader


class Runner(Protocol):
    """Answers the items of one job. Its methods are called in this order, each once."""

    reads_addresses: bool  # whether inputs may be addresses such as s3://bucket/folder
    spec: CaptionerSpec  # of the loaded model; set by `open`
    info: ModelInfo
    about: Mapping[str, Any]  # the runner's entries in the manifest

    def open(self, job: Job) -> AbstractContextManager[object]:
        """Load the model. Raises for unsuitable jobs, and for questions that cannot be asked about any picture."""
        ...

    def answer(
        self, items: Iterator[WorkItem], planner: JobPlanner, *, say: Callable[[str], None], stop: Callable[[], bool]
    ) -> Generator[Event]:
        """Yield one answer to every question that `planner.wants` returns, in order of completion.

        `say` is called with notes for the user. Once `stop` returns True, no more pictures are begun.
        """
        ...

    def waited_s(self, wall_s: float) -> float:
        """Seconds of `wall_s` that the model waited for pictures."""
        ...

    def report(self, tally: Tally, wall_s: float) -> str:
        """Stage times, for jobs with `profile`."""
        ...


class LocalRunner:
    """Answers in this process; pictures are read in other processes or threads."""

    reads_addresses = False
    about: Mapping[str, Any] = {}

    @contextmanager
    def open(self, job: Job) -> Iterator[None]:
        """Load the captioner and start the reader."""
        with Captioner.from_spec(job.spec) as captioner:
            check_questions(job, captioner)
            self._job, self._captioner = job, captioner
            self.spec, self.info = captioner.spec, captioner.info
            self._clock = StageClock() if job.profile is None else captioner.profile_clock(waits=job.profile == "wait")
            self._reader = open_reader(
                job.reader, self.spec.pictures, size=captioner.image_size, timeout_s=job.picture_timeout_s
            )
            with ExitStack() as stack:
                stack.enter_context(closing(self._reader))
                if job.trace is not None:
                    stack.enter_context(captioner.tracing(job.trace, tell=lambda text: self._say(text)))
                yield

    def answer(
        self, items: Iterator[WorkItem], planner: JobPlanner, *, say: Callable[[str], None], stop: Callable[[], bool]
    ) -> Generator[Event]:
        """See `Runner`. Compiles the programs of slow graph modes before it returns."""
        self._say = say
        self._captioner.oom_retry.tell = lambda text: say(f"note: {text}")
        if (programs := warm_up(self._job, self._captioner)) is not None:
            say(programs)
        return self._captioner.run(
            items,
            sampling=self._job.sampling,
            logprobs=self._job.logprobs,
            clock=self._clock,
            reader=self._reader,
            wants=None if planner.earlier is None else planner.wants,
            may_wait=may_wait(self._job.inputs),
            stop=stop,
        )

    def waited_s(self, wall_s: float) -> float:
        """See `Runner`."""
        return self._clock.seconds["read"]

    def report(self, tally: Tally, wall_s: float) -> str:
        """See `Runner`."""
        return Report(
            tally=tally,
            stages_s=self._clock.seconds,
            device_stages_s=self._clock.read_device_seconds(),
            wall_s=wall_s,
            model=self.info,
            batch_size=self._captioner.batch_size,
            synchronised=self._job.profile == "wait",
        ).format_table()


def check_questions(job: Job, captioner: Captioner) -> None:
    """Raise PromptTooLongError, PromptError or ValueError if a question cannot be asked about any picture.

    A row of a prompt file that cannot be answered gets a record with an error instead. Raises UsageError if the job has
    pictures and the model takes none.
    """
    if not job.inputs.is_text:
        captioner.info.require_adapter()
    for question in () if job.inputs.prompt_files else job.questions:
        if not (job.fills_variables and is_template(question)):
            prompt = question.prompt(captioner.info.default_prompt)
            captioner.encode_prompt(prompt, question.task, sampling=job.sampling)


def warm_up(job: Job, captioner: Captioner) -> str | None:
    """Compile the programs of a slow graph mode, so that the first picture does not wait.

    Other devices record a program when it first occurs, so a job of few pictures records few. Returns a note on number
    and time of the programs, or None if nothing is compiled.
    """
    question = job.questions[0]
    if not captioner.compiles_slowly or question.task.continuations:
        return None
    prompt = question.prompt(captioner.info.default_prompt)
    done = captioner.warm_up(prompt, max_new_tokens=job.sampling.max_new_tokens)
    return f"warm-up: {done.programs} programs ready in {done.seconds:.1f} s"
