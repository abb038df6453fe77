"""Many pictures through the service, as one client of it: a window of requests under way, results as they come.

No Gradio, no HTML; pictures and answers as values are in batch_types.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from datetime import UTC, datetime
from typing import Final, Literal

import torch

from llama_adapter.app.measuring.report import Tally
from llama_adapter.app.measuring.throughput import Circumstances, RunFigures, stage_differences
from llama_adapter.app.online.service import Ask, RequestHandle, Service, ServiceError
from llama_adapter.app.records.key import RecordKey, record_settings
from llama_adapter.app.records.manifest import new_run_id
from llama_adapter.app.records.record import answer_to_record
from llama_adapter.app.tasks.answers import Answer, AnswerError
from llama_adapter.app.tasks.choose import choosing
from llama_adapter.app.web.batch_types import PictureFile, Progress, Question, Result
from llama_adapter.app.web.byte_budget import ByteBudget
from llama_adapter.app.web.runs import Run
from llama_adapter.app.web.thumbnails import thumbnail
from llama_adapter.vision.errors import PictureError

TICK_S: Final = 0.4  # how often whoever shows the run hears of it
_RATE_WINDOW_S: Final = 10.0
_MAX_WAIT_S: Final = 0.5  # for a service that is busy, before it is asked again: it costs nothing
_NOTICE_S: Final = 0.1  # how late a stop may be noticed meanwhile


def default_window(service: Service) -> int:
    """As many requests as keep every slot in use while answers are on their way; never all that may wait."""
    most = min(service.limits.max_waiting_per_client, service.limits.max_waiting)
    return max(1, min(2 * service.batch_size, most))


class BatchRun:
    """One run. Read `results` to its end; `run.stop()`, from any thread, ends it early and keeps what is done."""

    def __init__(
        self,
        service: Service,
        files: Iterable[PictureFile],
        *,
        question: Question,
        run: Run,
        client: str,
        num_pictures: int | None = None,
        window: int | None = None,
        has_thumbnails: bool = False,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Raises UnavailableError without a model."""
        self._service, self._files, self._question = service, iter(files), question
        self._run, self._own = run, Run()  # stopped from outside, and by a problem
        self._client, self._num_pictures, self._has_thumbnails, self._now = client, num_pictures, has_thumbnails, now
        self.window = default_window(service) if window is None else window
        self.run_id = new_run_id()
        self._settings = record_settings(
            service.spec, info=service.info, sampling=question.sampling, task=choosing(question.choices)
        )
        # Asked for now: while the service restarts, or when it has closed, it tells neither.
        self._circumstances = circumstances_of(service)
        self._tally, self._num_reused = Tally(), 0
        self._num_begun = 0
        self._collected: list[Result] = []  # since the last tick
        self._num_tickets = 0  # under way in the service
        self._was_shared = False
        self._waits_for = ""
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._started = now()
        self._ended: float | None = None
        self._marks: deque[tuple[float, int]] = deque([(self._started, 0)])
        self._stages_before = self._stages_after = service.stage_seconds()
        self._budget = ByteBudget(max(1, service.limits.max_waiting_bytes // 8))
        self._reading = asyncio.Semaphore(2)

    async def results(self) -> AsyncGenerator[list[Result]]:
        """What has come since the last time, every `TICK_S` seconds or so; empty lists are signs of life.

        Raises, at the end, what the service says of a question that it does not take, and UnavailableError when it
        has closed.
        """
        workers = [asyncio.create_task(self._work()) for _ in range(self.window)]
        try:
            pending = set(workers)
            while pending:
                finished, pending = await asyncio.wait(pending, timeout=TICK_S, return_when=asyncio.FIRST_EXCEPTION)
                problems = [worker.exception() for worker in finished]
                if any(problem is not None for problem in problems):
                    self._own.stop()
                if not pending:
                    self._end()
                yield self._take()
            for worker in workers:
                worker.result()
        finally:
            self._own.stop()
            for worker in workers:
                worker.cancel()
            self._end()

    @property
    def progress(self) -> Progress:
        """How far it is by now."""
        done = self._tally.num_pictures + self._tally.num_failed
        now = self._now() if self._ended is None else self._ended
        began, done_before = self._marks[0] if self._ended is None else (self._started, 0)
        rate = (done - done_before) / (now - began) if now > began else 0.0
        left = None if self._num_pictures is None else self._num_pictures - done
        return Progress(
            num_pictures=self._num_pictures,
            num_done=done,
            num_failed=self._tally.num_failed,
            elapsed_s=now - self._started,
            pictures_per_s=rate,
            remaining_s=left / rate if left is not None and rate > 0 else None,
            waits_for=self._waits_for,
        )

    def figures(self, *, kind: Literal["batch", "measure"]) -> RunFigures:
        """Where its time went, until now or its end."""
        ended = self._now() if self._ended is None else self._ended
        return RunFigures(
            kind=kind,
            started_at=self._started_at,
            in_flight=max(1, min(self.window, self._num_begun)),
            num_pictures=self._tally.num_pictures,
            num_failed=self._tally.num_failed,
            num_tokens=self._tally.num_tokens,
            num_reused=self._num_reused,
            wall_s=ended - self._started,
            stages_s=stage_differences(self._stages_before, self._stages_after),
            was_shared=self._was_shared,
            circumstances=self._circumstances,
        )

    @property
    def _is_stopped(self) -> bool:
        return self._run.is_stopped or self._own.is_stopped

    def _take(self) -> list[Result]:
        results, self._collected = self._collected, []
        now = self._now()
        self._marks.append((now, self._tally.num_pictures + self._tally.num_failed))
        while len(self._marks) > 2 and now - self._marks[1][0] > _RATE_WINDOW_S:
            self._marks.popleft()
        return results

    def _end(self) -> None:
        if self._ended is None:
            self._ended, self._waits_for = self._now(), ""
            self._stages_after = self._service.stage_seconds()

    async def _work(self) -> None:
        """Answer one picture after another until there are no more."""
        while not self._is_stopped and (file := next(self._files, None)) is not None:
            index, self._num_begun = self._num_begun, self._num_begun + 1
            result = await self._answer(index, file)
            if result is not None:
                self._collected.append(result)

    async def _answer(self, index: int, file: PictureFile) -> Result | None:
        """One picture from its file to its record; None when it was cancelled."""
        try:
            async with self._reading:  # few at once: what is read waits in memory
                data = await asyncio.to_thread(file.read)
                await self._budget.acquire(len(data))
        except PictureError as error:
            return self._result(index, _unread(index, file.name, self._question.prompt, error))
        try:
            handle = await self._submit(file.name, data)
            return None if handle is None else await self._follow(index, handle, file.name, data)
        finally:
            await self._budget.release(len(data))

    async def _submit(self, name: str, data: bytes) -> RequestHandle | None:
        """A handle, if need be after waiting for room; None when the run was stopped meanwhile."""
        question = self._question
        ask = Ask(
            picture=data,
            prompt=question.prompt,
            label=name,
            sampling=question.sampling,
            choices=question.choices,
            client=self._client,
        )
        while not self._is_stopped:
            try:
                handle = self._service.submit(ask)
            except ServiceError as error:
                if error.retry_after_s is None:
                    raise
                self._waits_for = error.message
                await self._pause(min(error.retry_after_s, _MAX_WAIT_S))
                continue
            self._waits_for = ""
            return handle
        return None

    async def _pause(self, seconds: float) -> None:
        """Wait, but not on when the run is stopped."""
        until = self._now() + seconds
        while not self._is_stopped and (rest_s := until - self._now()) > 0:
            await asyncio.sleep(min(rest_s, _NOTICE_S))

    async def _follow(self, index: int, handle: RequestHandle, name: str, data: bytes) -> Result | None:
        self._num_tickets += 1
        self._run.add(handle)
        self._own.add(handle)
        try:
            answer = await handle.answer()
        finally:
            handle.cancel()  # harmless when it is answered
            self._run.discard(handle)
            self._own.discard(handle)
            self._num_tickets -= 1
        self._look_around()
        if answer.error is not None and answer.error.code == "cancelled":
            return None
        small = None
        if self._has_thumbnails and answer.error is None:
            small = await thumbnail(self._service, data, name=name, client=self._client)
        return self._result(index, answer, small)

    def _look_around(self) -> None:
        """Notice whether others are served as well: what is under way beyond our own."""
        status = self._service.status()
        self._was_shared = self._was_shared or status.num_running + status.num_waiting > self._num_tickets

    def _result(self, index: int, answer: Answer, small: str | None = None) -> Result:
        self._tally.add(answer)
        self._num_reused += answer.is_reused and answer.error is None
        digest = self._circumstances.model_digest
        key = RecordKey(picture=answer.picture, prompt=answer.prompt, model_digest=digest, settings=self._settings)
        record = answer_to_record(answer, key=key, run=self.run_id)
        return Result(index=index, record=record, thumbnail=small)


def circumstances_of(service: Service) -> Circumstances:
    """Raises UnavailableError without a model."""
    info = service.info
    return Circumstances(
        model=info.name,
        model_digest=info.digest,
        device=info.device,
        dtype=info.dtype,
        precision=info.precision,
        vision=info.vision,
        mode=info.mode,
        operators=info.operators,
        threads=torch.get_num_threads(),
        batch_size=service.batch_size,
    )


def _unread(index: int, name: str, prompt: str, error: PictureError) -> Answer:
    """The answer for a file whose bytes could not be had."""
    return Answer(
        index=index,
        picture=name,
        digest="",
        prompt=prompt,
        text="",
        token_ids=(),
        finish="error",
        error=AnswerError(code=error.code, message=error.message),
    )
