"""The main loop of a job on many machines: hands out chunks and takes answers until no chunk is in progress."""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.captioning.work_items import WorkItem
from llama_adapter.app.jobs.clusters.actors import Crew, LostChunk
from llama_adapter.app.jobs.clusters.chunks import MAX_LOSSES, AnsweredChunk, Chunk
from llama_adapter.app.jobs.clusters.cluster import WorkersFailedError, raise_problem
from llama_adapter.app.jobs.clusters.reading import Readers
from llama_adapter.app.jobs.clusters.worker import LoadedModel, NotLoaded
from llama_adapter.app.jobs.job_planner import JobPlanner
from llama_adapter.app.models.spec import ModelInfo
from llama_adapter.runtime.child_process import last_line

MAX_FAILED_READINGS = 3  # of a job, by errors of the reading code, such as a missing package
# Chunks in a row that are lost while they are read. Two pictures that end every process do not reach it, even if only
# they are left.
MAX_LOST_READINGS = 2 * MAX_LOSSES + 1
_WAIT_S = 0.05

_log = logging.getLogger("llama_adapter.scale")


class Drive:
    """Supplies readers and captioners with work. Not thread-safe."""

    def __init__(self, crew: Crew, readers: Readers, planner: JobPlanner, *, first: LoadedModel) -> None:
        """`first` is the model that all captioners must have."""
        # Seconds in which captioners answered, and in which they were ready, summed over all captioners.
        self.busy_s, self.ready_s = 0.0, 0.0
        self._crew, self._readers, self._planner = crew, readers, planner
        self._first = first
        self._again: list[Chunk] = []
        self._failures: list[Answer] = []
        self._num_failed_readings = 0
        self._num_lost_readings = 0  # since the last chunk that was read
        self._taken_at = time.perf_counter()

    def run(self, groups: Iterator[Sequence[WorkItem]], *, stop: Callable[[], bool]) -> Iterator[Answer]:
        """Yield the answers to all groups of pictures.

        Once `stop` returns True, only chunks that captioners have are answered.

        Raises WorkersFailedError, and the errors of listing the pictures.
        """
        while not stop():
            has_fed = self._feed(groups)
            self._hand_out()
            yield from self._take()
            if not (has_fed or self._again or self._readers.num_pending or self._crew.num_in_hand):
                return
        while self._crew.num_in_hand and self._crew.num_ready:
            yield from self._take()

    def _feed(self, groups: Iterator[Sequence[WorkItem]]) -> bool:
        """Give chunks to the readers as long as they take some. Returns False if no chunks are left."""
        while self._readers.can_take:
            if self._again:
                chunk = self._again.pop(0)
            elif (group := next(groups, None)) is not None:
                chunk = Chunk(items=tuple(group))
            else:
                return False
            self._readers.add(chunk)
        return True

    def _hand_out(self) -> None:
        while self._crew.can_take:
            taken = self._readers.take(timeout_s=0.0 if self._crew.num_in_hand else _WAIT_S)
            if taken is None:
                return
            chunk, read = taken
            if read is not None and not isinstance(read, Exception):
                self._num_lost_readings = 0
                self._crew.give(chunk, read)
                continue
            if read is None:
                self._num_lost_readings += 1
                if self._num_lost_readings >= MAX_LOST_READINGS:
                    raise WorkersFailedError(
                        "Pictures cannot be read on the machines of the cluster: the processes that read ended "
                        f"{MAX_LOST_READINGS} times in a row",
                        hint="see the memory and the logs of its machines; --debug says more, and with --out it "
                        "goes on from here",
                    )
            else:
                self._num_failed_readings += 1
                _log.info("reading failed: %s", read)
                if self._num_failed_readings >= MAX_FAILED_READINGS:
                    raise WorkersFailedError(
                        f"Pictures cannot be read on the machines of the cluster: {last_line(str(read))}",
                        hint="see that the same version of this program is installed on all of them; --debug says more",
                    ) from read
            self._lose(chunk)

    def _lose(self, chunk: Chunk) -> None:
        again, failures = chunk.after_loss()
        self._again += again
        self._failures += failures
        if failures:  # a picture is given up, so the next start does not end at the same place
            self._num_lost_readings = 0

    def _take(self) -> Iterator[Answer]:
        now = time.perf_counter()
        self.ready_s += self._crew.num_ready * (now - self._taken_at)
        self._taken_at = now
        for came in self._crew.wait(_WAIT_S):
            match came:
                case LostChunk(chunk, may_be_cause):
                    if may_be_cause:
                        self._lose(chunk)
                    else:
                        self._again.append(chunk)
                case chunk, answered:
                    yield from self._settle(chunk, answered)
                case _:
                    model = loaded(came)
                    check_alike(model.info, self._first.info, hosts=(model.host, self._first.host))
        failures, self._failures = self._failures, []
        yield from failures

    def _settle(self, chunk: Chunk, came: AnsweredChunk) -> Iterator[Answer]:
        """Yield the answers of a chunk, for the questions that the planner wants."""
        if came.problem is not None:
            raise_problem(came.problem, host=came.host)
        self.busy_s += came.busy_s
        answers = {answer.index: answer for answer in came.answers}
        doubtful, num_asked, num_missing = [], 0, 0
        for item, digest in zip(chunk.items, came.digests, strict=True):
            questions = item.questions if chunk.is_sure else self._planner.wants(item, digest)
            # Every question that was asked has an answer, if only a failed one, so a picture without any was left out.
            # If it was forgotten instead, it is asked again in a sure chunk, where a missing answer ends the job.
            is_left_out = not chunk.is_sure and not any(question.index in answers for question in item.questions)
            if is_left_out:
                doubtful += [dataclasses.replace(item, questions=questions)] if questions else []
                continue
            for question in questions:
                answer = answers.get(question.index)
                if answer is not None:
                    yield dataclasses.replace(answer, tag=question.tag)
                num_missing += answer is None
            num_asked += len(questions)
        if doubtful:
            self._again.append(Chunk(items=tuple(doubtful), is_sure=True))
        if num_missing:
            raise WorkersFailedError(
                f"{came.host} left {num_missing} of {num_asked} questions about its pictures without an answer",
                hint="see that the same version of this program is installed on all machines, and run again; with "
                "--out it goes on from here",
            )


def loaded(came: LoadedModel | NotLoaded) -> LoadedModel:
    """The model of a captioner. Raises the problem that prevented loading."""
    if isinstance(came, NotLoaded):
        raise_problem(came.problem, host=came.host)
    return came


def check_alike(model: ModelInfo, first: ModelInfo, *, hosts: tuple[str, str]) -> None:
    """Raise WorkersFailedError if a model differs from the first one. `hosts` are their machines."""
    for name in ("digest", "dtype", "precision", "context", "encoder"):
        here, there = getattr(model, name), getattr(first, name)
        if here != there:
            raise WorkersFailedError(
                f"The model on {hosts[0]} is another than on {hosts[1]}: its {name} is {here}, not {there}",
                hint="put the same files on all machines, and give --dtype and --device",
            )
