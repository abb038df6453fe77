"""The loop of a job over many machines: chunks out, answers in, until nothing is under way."""

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from llama_adapter.app.captioning.work_items import WorkItem
from llama_adapter.app.jobs.job_planner import JobPlanner
from llama_adapter.app.jobs.result_writer import ResultWriter
from llama_adapter.app.scale.actors import Crew
from llama_adapter.app.scale.chunks import AnsweredChunk, Chunk, answered
from llama_adapter.app.scale.ledger import Ledger
from llama_adapter.app.scale.options import WorkersFailedError
from llama_adapter.app.scale.pipeline import ReadingPipeline
from llama_adapter.app.scale.worker import LoadedModel, NotLoaded
from llama_adapter.runtime.child_process import last_line
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.problems import Problem

WINDOW = 32  # chunks of one Ray dataset: 300 MB of pixels, where all of them wait
MAX_FAILED_WINDOWS = 3
_WAIT_S = 0.05

_log = logging.getLogger("llama_adapter.scale")


class Drive:
    """Keeps readers and captioners busy, and hands what comes to the writer. Of one thread."""

    def __init__(
        self,
        crew: Crew,
        pipeline: ReadingPipeline,
        planner: JobPlanner,
        writer: ResultWriter,
        *,
        first: LoadedModel,
        has_earlier: bool,
    ) -> None:
        """`first`: the captioner that the others have to be like. `has_earlier`: there are records of earlier runs."""
        self.busy_s, self.ready_s = 0.0, 0.0  # of all captioners together: that they answered, and that they could have
        self._crew, self._pipeline, self._planner, self._writer = crew, pipeline, planner, writer
        self._first, self._has_earlier = first, has_earlier
        self._ledger = Ledger()
        self._again: list[Chunk] = []
        self._num_failed_windows = 0
        self._taken_at = time.perf_counter()

    def run(self, groups: Iterator[Sequence[WorkItem]], *, stop: Callable[[], bool]) -> None:
        """Answer all groups of pictures; once `stop` says so, only what is in the captioners' hands.

        Raises WorkersFailedError, and what listing and writing raise.
        """
        while not stop():
            has_fed = self._feed(groups)
            self._hand_out()
            if self._is_idle and not has_fed:
                self._again, failures = self._ledger.enter_lost()
                for failure in failures:
                    self._writer.write(failure)
                if not self._again:
                    return
            self._take()
        while self._crew.num_in_hand and self._crew.num_ready:
            self._crew.give_returned()
            self._take()

    @property
    def _is_idle(self) -> bool:
        return not (self._again or self._pipeline.num_pending or self._crew.num_in_hand)

    def _feed(self, groups: Iterator[Sequence[WorkItem]]) -> bool:
        """See to it that readers have something to do; says whether there was anything to give them, or no need."""
        if self._pipeline.num_pending >= 2:
            return True
        window, self._again = self._again[:WINDOW], self._again[WINDOW:]
        window += [self._ledger.enter(group) for group in itertools.islice(groups, WINDOW - len(window))]
        if window:
            self._pipeline.add(window)
        return bool(window)

    def _hand_out(self) -> None:
        self._crew.give_returned()
        while self._crew.can_take:
            try:
                chunk = self._pipeline.take(timeout_s=0.0 if self._crew.num_in_hand else _WAIT_S)
            except Exception as error:
                self._num_failed_windows += 1
                _log.info("reading failed: %s", error)
                if self._num_failed_windows >= MAX_FAILED_WINDOWS:
                    raise WorkersFailedError(
                        f"Pictures cannot be read on the machines of the cluster: {last_line(str(error))}",
                        hint="see that the same version of this program is installed on all of them; --debug says more",
                    ) from error
                continue
            if chunk is None:
                return
            self._crew.give(chunk)

    def _take(self) -> None:
        now = time.perf_counter()
        self.ready_s += self._crew.num_ready * (now - self._taken_at)
        self._taken_at = now
        for news in self._crew.take_news():
            self._writer.say(news)
        for came in self._crew.wait(_WAIT_S):
            if isinstance(came, AnsweredChunk):
                self._settle(came)
            else:
                check_alike(loaded(came), self._first)

    def _settle(self, came: AnsweredChunk) -> None:
        """Write the answers of a chunk that is still under way."""
        if came.problem is not None:
            raise_problem(came.problem, host=came.host)
        self.busy_s += came.busy_s
        chunk = self._ledger.settle(came.number)
        if chunk is None:
            return
        by_position = answered(came.answers, chunk.items)
        doubtful, num_asked, num_missing = [], 0, 0
        for position, item in enumerate(chunk.items):
            questions = item.questions
            if self._has_earlier and not chunk.is_sure:
                questions = self._planner.wants(item, came.digests[position])
            if position in came.left_out:
                doubtful += [dataclasses.replace(item, questions=questions)] if questions else []
                continue
            wanted = {question.index for question in questions}
            for answer in by_position.get(position, ()):
                if answer.index in wanted:
                    wanted.remove(answer.index)
                    self._writer.write(answer)
            num_asked += len(questions)
            num_missing += len(wanted)
        if doubtful:
            self._again.append(self._ledger.enter(doubtful, is_sure=True))
        if num_missing:
            raise WorkersFailedError(
                f"{came.host} left {num_missing} of {num_asked} questions about its pictures without an answer",
                hint="see that the same version of this program is installed on all machines, and run again; with "
                "--out it goes on from here",
            )


def loaded(came: LoadedModel | NotLoaded) -> LoadedModel:
    """The model of a captioner. Raises what was in the way of it."""
    if isinstance(came, NotLoaded):
        raise_problem(came.problem, host=came.host)
    return came


def check_alike(model: LoadedModel, first: LoadedModel) -> None:
    """Raise WorkersFailedError where a captioner is another than the first: one job has one model."""
    for name in ("digest", "dtype", "precision", "context", "encoder"):
        here, there = getattr(model.info, name), getattr(first.info, name)
        if here != there:
            raise WorkersFailedError(
                f"The model on {model.host} is another than on {first.host}: its {name} is {here}, not {there}",
                hint="put the same files on all machines, and give --dtype and --device",
            )


def raise_problem(problem: Problem, *, host: str) -> NoReturn:
    """Raise what went wrong on a machine, in its words."""
    sentence = f"On {host}: {problem.sentence}"
    if problem.exit_code == ExitCode.USAGE:
        raise UsageError(sentence, hint=problem.hint)
    raise WorkersFailedError(sentence, hint=problem.hint)
