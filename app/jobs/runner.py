"""Runners turn the items of a job into answers: `LocalRunner` in this process, `app/jobs/clusters` with Ray."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from llama_adapter.app.captioning.stage_clock import StageClock
from llama_adapter.app.captioning.tasks.answers import Event
from llama_adapter.app.captioning.work_items import WorkItem, read_ahead
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.jobs.job_planner import JobPlanner
from llama_adapter.app.jobs.questions import is_template
from llama_adapter.app.jobs.report import Report, Tally
from llama_adapter.app.models.known import KnownModel
from llama_adapter.app.models.spec import CaptionerSpec, ModelInfo
from llama_adapter.app.pictures.inputs import may_wait
from llama_adapter.app.pictures.reading.isolated import open_reader

if TYPE_CHECKING:
    from llama_adapter.app.captioning.captioner import Captioner


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


class LocalRunner:
    """Answers in this process; pictures are read in other processes or threads."""

    reads_addresses = False
    about: Mapping[str, Any] = {}
    _captioner: "Captioner | None"  # None until it is needed

    @contextmanager
    def open(self, job: Job) -> Iterator[None]:
        """Load the captioner and start the reader. A model that is known is loaded once a picture has a question."""
        self._job, self._captioner = job, None
        with ExitStack() as self._stack:
            known = None if job.profile is not None or job.trace is not None else KnownModel.recall(job.spec)
            if known is None:
                captioner = self._load(job.spec)
                known = KnownModel(spec=captioner.spec, info=captioner.info, pixels=captioner.pixels)
            elif not job.inputs.is_text:
                known.info.require_sight()
            self.spec, self.info = known.spec, known.info
            reader = open_reader(
                job.reader,
                self.spec.pictures,
                pixels=known.pixels,
                timeout_s=job.picture_timeout_s,
                device=self.spec.device,
            )
            self._reader = self._stack.enter_context(closing(reader))
            yield

    def _load(self, spec: CaptionerSpec) -> "Captioner":
        from llama_adapter.app.captioning.captioner import Captioner

        job = self._job
        captioner = self._captioner = self._stack.enter_context(Captioner.from_spec(spec))
        check_questions(job, captioner)
        waits = job.profile == "wait"
        self._clock = StageClock() if job.profile is None else captioner.profile_clock(waits=waits)
        if job.trace is not None:
            self._stack.enter_context(captioner.tracing(job.trace, tell=lambda text: self._say(text)))
        return captioner

    def answer(
        self, items: Iterator[WorkItem], planner: JobPlanner, *, say: Callable[[str], None], stop: Callable[[], bool]
    ) -> Generator[Event]:
        """See `Runner`. Compiles the programs of slow graph modes before it returns."""
        self._say = say
        assert isinstance(self.spec.batch_size, int), "the spec is complete"
        pictures = self._stack.enter_context(
            read_ahead(
                items,
                reader=self._reader,
                batch_size=self.spec.batch_size,
                device=self.spec.device,
                wants=None if planner.earlier is None else planner.wants,
                may_wait=may_wait(self._job.inputs),
                stop=stop,
            )
        )
        if self._captioner is None and not pictures.has_results():
            return (event for event in list[Event]())
        captioner = self._captioner or self._load(self._job.spec)
        captioner.oom_retry.tell = lambda text: say(f"note: {text}")
        if (programs := warm_up(self._job, captioner)) is not None:
            say(programs)
        return captioner.answer_read(
            pictures, sampling=self._job.sampling, logprobs=self._job.logprobs, clock=self._clock, stop=stop
        )

    def waited_s(self, wall_s: float) -> float:
        """See `Runner`."""
        return 0.0 if self._captioner is None else self._clock.seconds["read"]

    def report(self, tally: Tally, wall_s: float) -> str:
        """Stage times, for jobs with `profile`."""
        assert self._captioner is not None, "jobs with `profile` load first"
        return Report(
            tally=tally,
            stages_s=self._clock.seconds,
            device_stages_s=self._clock.read_device_seconds(),
            wall_s=wall_s,
            model=self.info,
            batch_size=self._captioner.batch_size,
            synchronised=self._job.profile == "wait",
        ).format_table()


def check_questions(job: Job, captioner: "Captioner") -> None:
    """Raise PromptTooLongError, PromptError or ValueError if a question cannot be asked about any picture.

    A row of a prompt file that cannot be answered gets a record with an error instead. Raises UsageError if the job has
    pictures and the model takes none.
    """
    if not job.inputs.is_text:
        captioner.info.require_sight()
    for question in () if job.inputs.prompt_files else job.questions:
        if not (is_template(question) and job.fills_variables):
            prompt = question.prompt(captioner.info.default_prompt)
            captioner.encode_prompt(prompt, question.task, sampling=job.sampling)


def warm_up(job: Job, captioner: "Captioner") -> str | None:
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
