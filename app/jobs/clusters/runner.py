"""Runs a job on a Ray cluster. Only this process lists the pictures, hands them out, and writes the answers."""

import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

from llama_adapter.app.captioning.tasks.answers import Event
from llama_adapter.app.captioning.work_items import WorkItem
from llama_adapter.app.jobs.clusters.actors import IN_HAND, Crew
from llama_adapter.app.jobs.clusters.chunks import Known, in_chunks, sizes
from llama_adapter.app.jobs.clusters.cluster import RayOptions, joined_cluster, machines
from llama_adapter.app.jobs.clusters.drive import Drive, loaded
from llama_adapter.app.jobs.clusters.places import num_reading_tasks, plan_places
from llama_adapter.app.jobs.clusters.reading import Readers, Reading
from llama_adapter.app.jobs.clusters.worker import LoadedModel
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.jobs.job_planner import JobPlanner
from llama_adapter.app.jobs.result_writer import how_to_go_on
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.problems import Problem
from llama_adapter.runtime.terminal.run_guarded import format_problem
from llama_adapter.runtime.terminal.stderr_lines import say

# Prints its argument if its stdin ends without a byte, which means that this process has ended.
_LISTENER: Final = "import sys; sys.stdin.buffer.read(1) or print(sys.argv[1], file=sys.stderr)"
_PATIENCE_S: Final = 5.0  # timeout for the listener to end


class RayRunner:
    """Answers on the machines of a cluster; see `jobs.runner.Runner`."""

    reads_addresses = True

    def __init__(self, options: RayOptions) -> None:
        self._options = options

    @contextmanager
    def open(self, job: Job) -> Iterator[None]:
        """Start captioners on the cluster and wait for the first one, which reports spec and info of the model."""
        for name, value in (("--profile", job.profile), ("--trace", job.trace)):
            if value is not None:
                raise UsageError(f"{name} measures one process", hint=f"leave --engine ray or {name} out")
        with ExitStack() as stack:
            stack.enter_context(last_words(job))
            where = stack.enter_context(joined_cluster(self._options))
            places = plan_places(
                machines(), device=job.spec.device, actors=self._options.actors, ranks=job.spec.tensor_parallel
            )
            self._say: Callable[[str], object] = (lambda text: None) if job.quiet else say
            self._say(f"{where}, {'1 captioner' if len(places) == 1 else f'{len(places)} captioners'}")
            self._job = job
            self._crew = Crew(job, places, os.getcwd(), say=lambda text: self._say(text))
            stack.callback(self._crew.stop)
            self._crew.start()
            self._first = _first_ready(self._crew)
            self.spec, self.info = self._first.spec, self._first.info
            self.about: Mapping[str, Any] = {"engine": {"name": "ray", "captioners": len(places)}}
            yield

    def answer(
        self, items: Iterator[WorkItem], planner: JobPlanner, *, say: Callable[[str], None], stop: Callable[[], bool]
    ) -> Generator[Event]:
        """See `Runner`. Captioners compile their programs when they are loaded."""
        self._say, num_captioners = say, len(self._crew.places)
        index, num_reading = planner.earlier, num_reading_tasks(machines(), num_captioners=num_captioners)
        readers = Readers(
            Reading(
                spec=self.spec.pictures,
                pixels=self._first.pixels,
                kind=self._job.reader,
                timeout_s=self._job.picture_timeout_s,
                folder=os.getcwd(),
            ),
            known=None if index is None else Known(index=index, retry_errors=self._job.retry_errors),
            at_once=num_reading,
            most=num_reading + IN_HAND * num_captioners,
        )
        self._drive = Drive(self._crew, readers, planner, first=self._first)
        assert isinstance(self.spec.batch_size, int), "the spec of a loaded model has no open values"
        chunk_sizes = sizes(self.spec.batch_size, num_alike=IN_HAND * num_captioners)
        yield from self._drive.run(in_chunks(items, chunk_sizes), stop=stop)

    def waited_s(self, wall_s: float) -> float:
        """See `Runner`."""
        drive = self._drive
        return wall_s * max(0.0, 1 - drive.busy_s / drive.ready_s) if drive.ready_s else 0.0


def _first_ready(crew: Crew) -> LoadedModel:
    """Wait for the first captioner. Raises the error of loading it."""
    while True:
        for came in crew.wait(1.0):
            assert not isinstance(came, tuple), "nothing was handed out yet"
            return loaded(came)


@contextmanager
def last_words(job: Job) -> Iterator[None]:
    """During the context, a second process prints a sentence on stderr if this process is ended from outside Python.

    Ray ends this process, with exit code 1, when its node is dead.
    """
    kept = "The answers so far are printed above" if job.out is None else f"The records in `{job.out}` are kept"
    problem = Problem(
        exit_code=ExitCode.FAILED,
        http_status=500,
        sentence="This process was ended from outside: Ray does that when its node on this machine, or its head, is "
        f"dead. {kept}, and the pictures under way have no answer",
        hint=f"check that the cluster runs (`ray status`) and this machine has free memory; then {how_to_go_on(job)}",
    )
    reader, writer = os.pipe()
    try:
        command = [sys.executable, "-I", "-S", "-c", _LISTENER, format_problem(problem)]
        # It has its own session, because neither Ctrl-C nor the end of a shell may end it first.
        listener = subprocess.Popen(command, stdin=reader, stdout=subprocess.DEVNULL, start_new_session=True)
    finally:
        os.close(reader)
    try:
        yield
    finally:
        with suppress(OSError):  # the listener has ended
            os.write(writer, b".")
        os.close(writer)
        try:
            listener.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            listener.kill()
            listener.wait()
