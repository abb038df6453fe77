"""Sends many pictures to the service as one client: keeps a window of requests in flight, and streams results.

Imports no Gradio.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import torch
from PIL import Image

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.jobs.records.key import RecordKey, record_settings
from llama_adapter.app.jobs.records.manifest import new_run_id
from llama_adapter.app.jobs.records.record import Record, answer_to_record
from llama_adapter.app.jobs.report import Tally
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.reading.views import data_address
from llama_adapter.app.serving.online.request_handle import Ask, RequestHandle
from llama_adapter.app.serving.online.room import Room
from llama_adapter.app.serving.online.service import Service
from llama_adapter.app.serving.online.types import ServiceError
from llama_adapter.app.serving.web.run_history import RunFigures, stage_differences
from llama_adapter.app.serving.web.runs import Run
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.vision.errors import PictureError

TICK_S: Final = 0.4  # time between two lists of results
THUMBNAIL_SIDE: Final = 160  # pixels
_RATE_WINDOW_S: Final = 10.0
_MAX_WAIT_S: Final = 0.5  # longest pause before a busy service is asked again
_NOTICE_S: Final = 0.1  # how often this pause checks whether the run was stopped


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureFile:
    """A picture to read later. `read` returns the bytes of its file or raises PictureError."""

    name: str  # printable, unique in its run
    read: Callable[[], bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result for a picture: its answer, or its error."""

    index: int  # index in the order of the files
    record: Record
    thumbnail: str | None  # a `data:` address


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The progress of a run."""

    num_pictures: int | None  # None: not known yet
    num_done: int  # including failed pictures
    num_failed: int
    elapsed_s: float
    pictures_per_s: float  # over the last seconds; after the end, answered pictures over the whole run
    remaining_s: float | None
    waits_for: str  # why the service accepts no requests at the moment; empty: it accepts them


def default_window(service: Service) -> int:
    """The number of requests in flight that keeps every slot busy, within the limits of one client."""
    most = min(service.limits.max_waiting_per_client, service.limits.max_waiting)
    return max(1, min(2 * service.batch_size, most))


class BatchRun:
    """One run. The caller reads `results` to the end. `run.stop()` in any thread ends it early and keeps results."""

    def __init__(
        self,
        service: Service,
        files: Iterable[PictureFile],
        *,
        question: Question,
        sampling: SamplingParams,
        run: Run,
        client: str,
        num_pictures: int | None = None,
        window: int | None = None,
        has_thumbnails: bool = False,
    ) -> None:
        """`window` is the number of requests in flight. Raises UnavailableError if no model is loaded."""
        self._service, self._files, self._question, self._sampling = service, iter(files), question, sampling
        # Read now, because a service that restarts or is closed cannot tell it later.
        self._info, self._batch_size = service.info, service.batch_size
        self._run = run
        self._client, self._num_pictures, self._has_thumbnails = client, num_pictures, has_thumbnails
        self.window = default_window(service) if window is None else window
        self.run_id = new_run_id()
        self._settings = record_settings(service.spec, info=self._info, sampling=sampling, task=question.task)
        self._tally, self._num_reused = Tally(), 0
        self._num_begun = 0
        self._new: list[Result] = []  # since the last tick
        self._num_in_flight = 0
        self._was_shared = False
        self._waits_for = ""
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._started = time.perf_counter()
        self._ended: float | None = None
        self._marks: deque[tuple[float, int]] = deque([(self._started, 0)])
        self._stages_before = self._stages_after = service.stage_seconds()
        self._room = Room(most_bytes=service.limits.max_waiting_bytes // 8)
        self._reading = asyncio.Semaphore(2)

    async def results(self) -> AsyncGenerator[list[Result]]:
        """Lists of new results, about every `TICK_S` seconds. A list may be empty.

        At the end, raises the service's error if it refused the question, and UnavailableError if it was closed.
        """
        workers = [asyncio.create_task(self._work()) for _ in range(self.window)]
        try:
            pending = set(workers)
            while pending:
                finished, pending = await asyncio.wait(pending, timeout=TICK_S, return_when=asyncio.FIRST_EXCEPTION)
                if any(not worker.cancelled() and worker.exception() for worker in finished):
                    for worker in pending:
                        worker.cancel()
                if not pending:
                    self._end()
                yield self._take()
            for worker in workers:
                if not worker.cancelled():
                    worker.result()
        finally:
            for worker in workers:
                worker.cancel()
            self._end()

    @property
    def progress(self) -> Progress:
        """The progress of the run."""
        done = self._tally.num_pictures + self._tally.num_failed
        now = time.perf_counter() if self._ended is None else self._ended
        began, done_before = self._marks[0] if self._ended is None else (self._started, 0)
        counted = done if self._ended is None else self._tally.num_pictures  # at the end, the same as in `figures`
        rate = (counted - done_before) / (now - began) if now > began else 0.0
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

    def figures(self) -> RunFigures:
        """Times and counts of the run, until its end or until now."""
        ended = time.perf_counter() if self._ended is None else self._ended
        return RunFigures(
            started_at=self._started_at,
            in_flight=max(1, min(self.window, self._num_begun)),
            num_pictures=self._tally.num_pictures,
            num_failed=self._tally.num_failed,
            num_tokens=self._tally.num_tokens,
            num_reused=self._num_reused,
            wall_s=ended - self._started,
            stages_s=stage_differences(self._stages_before, self._stages_after),
            was_shared=self._was_shared,
            info=self._info,
            threads=torch.get_num_threads(),
            batch_size=self._batch_size,
        )

    def _take(self) -> list[Result]:
        results, self._new = self._new, []
        now = time.perf_counter()
        self._marks.append((now, self._tally.num_pictures + self._tally.num_failed))
        while len(self._marks) > 2 and now - self._marks[1][0] > _RATE_WINDOW_S:
            self._marks.popleft()
        return results

    def _end(self) -> None:
        if self._ended is None:
            self._ended, self._waits_for = time.perf_counter(), ""
            self._stages_after = self._service.stage_seconds()

    async def _work(self) -> None:
        """Answer one picture after another until none is left."""
        while not self._run.is_stopped and (file := next(self._files, None)) is not None:
            index, self._num_begun = self._num_begun, self._num_begun + 1
            result = await self._answer(index, file)
            if result is not None:
                self._new.append(result)

    async def _answer(self, index: int, file: PictureFile) -> Result | None:
        """One picture from its file to its record; None if it was cancelled."""
        try:
            async with self._reading:  # a few at once, because the bytes that are read wait in memory
                data = await asyncio.to_thread(file.read)
                await self._room.take(len(data))
        except PictureError as error:
            reason, asked = AnswerError(code=error.code, message=error.message), self._question
            prompt = asked.shown(self._info.default_prompt)
            return self._result(index, Answer.failed(reason, index=index, picture=file.name, prompt=prompt))
        try:
            handle = await self._submit(file.name, data)
            return None if handle is None else await self._follow(index, handle, file.name, data)
        finally:
            self._room.give_back(len(data))

    async def _submit(self, name: str, data: bytes) -> RequestHandle | None:
        """Submit a picture, waiting while the service is busy; returns its handle, None if the run was stopped."""
        ask = Ask(
            picture=data,
            prompt=self._question.prompt(self._info.default_prompt),
            label=name,
            sampling=self._sampling,
            task=self._question.task,
            client=self._client,
        )
        while not self._run.is_stopped:
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
        """Wait, but not longer than until the run is stopped."""
        until = time.perf_counter() + seconds
        while not self._run.is_stopped and (rest_s := until - time.perf_counter()) > 0:
            await asyncio.sleep(min(rest_s, _NOTICE_S))

    async def _follow(self, index: int, handle: RequestHandle, name: str, data: bytes) -> Result | None:
        self._num_in_flight += 1
        self._run.add(handle)
        try:
            answer = await handle.answer()
        finally:
            handle.cancel()  # has no effect on an answered request
            self._run.discard(handle)
            self._num_in_flight -= 1
        status = self._service.status()
        # With requests of other clients, there are more than those of this run.
        self._was_shared = self._was_shared or status.num_running + status.num_waiting > self._num_in_flight
        if answer.error is not None and answer.error.code == "cancelled":
            return None
        small = None
        if self._has_thumbnails and answer.error is None:
            small = await _thumbnail(self._service, data, name=name, client=self._client)
        return self._result(index, answer, small)

    def _result(self, index: int, answer: Answer, small: str | None = None) -> Result:
        self._tally.add(answer)
        self._num_reused += answer.is_reused and answer.error is None
        digest = self._info.digest
        key = RecordKey(picture=answer.picture, prompt=answer.prompt, model_digest=digest, settings=self._settings)
        record = answer_to_record(answer, key=key, run=self.run_id)
        return Result(index=index, record=record, thumbnail=small)


async def _thumbnail(service: Service, picture: bytes, *, name: str, client: str) -> str | None:
    """A thumbnail as a `data:` URI, with sides of at most `THUMBNAIL_SIDE` pixels; None if this fails."""
    try:
        reading = service.view(picture, name=name, side=THUMBNAIL_SIDE, client=client)
        view = await asyncio.wait_for(asyncio.wrap_future(reading), service.limits.timeout_s)
    except Exception:  # a missing thumbnail must not lose the answer
        return None
    return None if view.pixels is None else data_address(Image.fromarray(view.pixels))
