"""The Throughput tab: stage times of runs, and a measurement with the sample pictures."""

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import gradio as gr

from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.jobs.report import numbers
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.pictures.inputs import InputSpec, read_inputs
from llama_adapter.app.serving.online.service import Service
from llama_adapter.app.serving.web.batch_run import BatchRun, PictureFile
from llama_adapter.app.serving.web.html import alert, counted, rate, render, told
from llama_adapter.app.serving.web.run_history import RunFigures, to_compare
from llama_adapter.app.serving.web.runs import Run, Runs
from llama_adapter.app.serving.web.widgets import DIRECT, PRIVATE, html_view
from llama_adapter.llm.engine.sampling_params import SamplingParams

TAB: Final = "throughput"
IN_FLIGHT: Final = (1, 5, 16)
SECONDS_EACH: Final = 3.0
_MAX_TABLE_ROWS: Final = 30
_MEANINGS: Final = {  # stage -> its meaning, in the order of the stages
    "read": "reading and resizing pictures, in threads beside the engine",
    "clip": "encoding pictures",
    "pre": "projecting the encoding to the decoder's layers",
    "forward": "the decoder's steps",
    "post": "choosing tokens",
    "decode": "turning tokens into text",
    "write": "delivering answers",
}
_NOTE: Final = (
    f"Measure asks about the sample pictures for about {SECONDS_EACH:.0f} seconds each with "
    f"{', '.join(map(str, IN_FLIGHT[:-1]))} and {IN_FLIGHT[-1]} requests in flight, as one client among others. "
    "Batch runs are listed as well."
)


def build_throughput(service: Service, *, runs: Runs, tab: gr.Tab) -> None:
    """Lay out the tab and connect its events. Call it inside `tab` or a tab within it. Opening `tab` shows new runs."""
    html_view(render("parts", "note", text=_NOTE))
    with gr.Row(elem_classes="la-buttons"):
        start = gr.Button("Measure", variant="primary", elem_id="throughput-measure", min_width=110, scale=0)
        stop = gr.Button("Stop", variant="stop", visible=False, elem_id="throughput-stop", min_width=110, scale=0)
    notice = html_view("", elem_id="throughput-notice")
    view = html_view(report(()), elem_id="throughput-report")
    free = threading.Lock()  # concurrent measurements would disturb each other

    async def measure_runs(request: gr.Request) -> AsyncGenerator[list[Any]]:
        page = str(request.session_hash)
        history = runs.history(page)
        if not free.acquire(blocking=False):
            yield [_status("Another page is measuring. Try again in a few seconds."), *[gr.skip()] * 3]
            return
        try:
            with runs.open(page, TAB) as run:
                async with aclosing(measure(service, history, run=run, client=f"measurement of page {page}")) as lines:
                    async for line in lines:
                        yield [_status(line), report(history), *_buttons(is_running=True)]
                ending = _status("Stopped. Finished measurements are kept." if run.is_stopped else "Measured.")
        except Exception as error:
            ending = alert(*told(error))
        finally:
            free.release()
        yield [ending, report(history), *_buttons(is_running=False)]

    def end(request: gr.Request) -> None:
        runs.stop(str(request.session_hash), TAB)

    def show(request: gr.Request) -> str:
        return report(runs.history(str(request.session_hash)))

    start.click(measure_runs, None, [notice, view, start, stop], concurrency_limit=None, **PRIVATE)
    stop.click(end, **DIRECT)
    tab.select(show, None, view, **PRIVATE)  # runs of the Batch tab


def _status(text: str) -> str:
    return render("parts", "status", text=text)


def _buttons(*, is_running: bool) -> list[Any]:
    return [gr.update(visible=not is_running), gr.update(visible=is_running)]


def report(runs: Sequence[RunFigures]) -> str:
    """The runs as HTML, oldest first: facts of the last one, bars by requests in flight, a table."""
    return render(
        "throughput",
        "report",
        runs=list(runs),
        compared=to_compare(runs),
        sentence=sentence_of(runs[-1]) if runs else "",
        meanings=_MEANINGS,
        max_rows=_MAX_TABLE_ROWS,
        numbers=numbers,
    )


def sentence_of(run: RunFigures) -> str:
    """A sentence about what limits the speed of a run."""
    failed = f" {run.num_failed:,} failed." if run.num_failed else ""
    if run.bound_by is None or not run.num_pictures:
        return f"No picture was answered.{failed}"
    stage, share = run.bound_by
    sentence = f"Bottleneck: {stage} ({_MEANINGS[stage]}), {share:.0%} of all stage times."
    if run.busy_share < 0.7:
        sentence += f" The engine was busy {run.busy_share:.0%} of the time and waited for pictures otherwise."
    if run.num_reused:
        sentence += f" Already encoded: {counted(run.num_reused, 'picture')}."
    if run.was_shared:
        sentence += " The stage times include requests of other clients."
    return sentence + failed


async def measure(
    service: Service, history: deque[RunFigures], *, run: Run, client: str, seconds_each: float | None = None
) -> AsyncGenerator[str]:
    """Do a short warm-up and one run for each of `IN_FLIGHT`; yields lines of progress, adds the runs to `history`.

    Raises what `BatchRun.results` raises. Finished runs then stay in the history.
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
            question=Question(),
            sampling=SamplingParams(),
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
            history.append(figures)


def _samples() -> list[bytes]:
    return [Path(one.label).read_bytes() for one in read_inputs(InputSpec(paths=(str(sample_pictures()),)))]


def fresh_files(
    pictures: Sequence[bytes], *, seconds: float, at_least: int, now: Callable[[], float] = time.monotonic
) -> Iterator[PictureFile]:
    """Repeat the pictures for `seconds`, at least `at_least` of them, each time with different bytes.

    The service encodes equal bytes only once. Decoders ignore bytes after the end of a picture.
    """
    until = now() + seconds
    for number, picture in enumerate(cycle(pictures)):
        if number >= at_least and now() >= until:
            return
        yield PictureFile(name=f"sample {number}", read=partial(_with_tail, picture))


def _with_tail(picture: bytes) -> bytes:
    return picture + secrets.token_bytes(16)
