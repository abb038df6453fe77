"""Measurements on request: the sample pictures through the service, with more and more of them under way. No Gradio."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Final

from llama_adapter.app.inputs import expand_inputs
from llama_adapter.app.measuring.throughput import RunHistory
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.online.service import Service
from llama_adapter.app.web.batch_run import BatchRun
from llama_adapter.app.web.batch_types import PictureFile, Question
from llama_adapter.app.web.batch_view import rate
from llama_adapter.app.web.runs import Run
from llama_adapter.llm.engine.sampling_params import SamplingParams

IN_FLIGHT: Final = (1, 5, 16)
SECONDS_EACH: Final = 3.0


async def measure(
    service: Service, history: RunHistory, *, run: Run, client: str, seconds_each: float | None = None
) -> AsyncGenerator[str]:
    """One run for each of `IN_FLIGHT`, after a few pictures that do not count; yields what is being done.

    Raises as `BatchRun.results`; what was measured before stays in the history.
    """
    pictures = await asyncio.to_thread(_samples)
    seconds_each = SECONDS_EACH if seconds_each is None else seconds_each
    warm_up = (2, seconds_each / 6)
    for number, (in_flight, seconds) in enumerate([warm_up, *((count, seconds_each) for count in IN_FLIGHT)]):
        if run.is_stopped:
            return
        batch = BatchRun(
            service,
            fresh_files(pictures, seconds=seconds, at_least=2 * in_flight),
            question=Question(prompt=service.info.default_prompt, choices=None, sampling=SamplingParams()),
            run=run,
            client=client,
            window=in_flight,
        )
        async with aclosing(batch.results()) as results:
            async for _ in results:
                progress = batch.progress
                waits = f", waiting: {progress.waits_for}" if progress.waits_for else ""
                yield f"{in_flight} in flight: {progress.num_done} pictures, {rate(progress.pictures_per_s)}{waits}"
        figures = batch.figures(kind="measure")
        if number > 0 and figures.num_pictures:
            history.add(figures)


def _samples() -> list[bytes]:
    return [Path(picture.path).read_bytes() for picture in expand_inputs([sample_pictures()])]


def fresh_files(
    pictures: Sequence[bytes], *, seconds: float, at_least: int, now: Callable[[], float] = time.monotonic
) -> Iterator[PictureFile]:
    """The pictures over and over, for so many seconds from the first on, and each time as another file.

    The service encodes equal bytes once. What stands behind a picture's end no reader looks at.
    """
    until = now() + seconds
    for number, picture in enumerate(cycle(pictures)):
        if number >= at_least and now() >= until:
            return
        yield PictureFile(name=f"sample {number}", read=partial(_with_tail, picture))


def _with_tail(picture: bytes) -> bytes:
    return picture + secrets.token_bytes(16)
