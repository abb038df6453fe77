"""The Throughput tab: where the time of runs went, and a measurement on request. HTML is throughput_view's."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import gradio as gr
from gradio import processing_utils, utils

from llama_adapter.app.measuring.throughput import RunHistory, history_of
from llama_adapter.app.online.service import Service
from llama_adapter.app.web import throughput_view
from llama_adapter.app.web.batch_view import problem
from llama_adapter.app.web.escaping import escaped
from llama_adapter.app.web.measuring import IN_FLIGHT, SECONDS_EACH, measure
from llama_adapter.app.web.picture_input import plain
from llama_adapter.app.web.runs import Runs
from llama_adapter.app.web.troubles import told

TAB: Final = "throughput"
_CLOSED: Final[dict[str, Any]] = {"api_visibility": "private", "show_progress": "hidden"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Controls:
    notice: gr.HTML
    view: gr.HTML
    download: gr.DownloadButton
    measure: gr.Button
    stop: gr.Button

    def shown(self) -> list[Any]:
        """The outputs of a measurement."""
        return [self.notice, self.view, self.download, self.measure, self.stop]


def build_throughput(service: Service, *, runs: Runs | None = None) -> None:
    """Lay the tab out and connect it; called inside a `gr.Tab`. `runs` are stopped when their page is left."""
    history = history_of(service)
    tab = gr.context.Context.block
    plain(f'<p class="la-note">{_introduction()}</p>')
    with gr.Row(elem_classes="la-buttons"):
        measure = gr.Button("Measure", variant="primary", elem_id="throughput-measure", min_width=90)
        stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="throughput-stop", min_width=70)
        download = gr.DownloadButton("Report (JSON)", interactive=False, elem_id="throughput-download", min_width=110)
    notice = plain("", elem_id="throughput-notice")
    view = plain(lambda: throughput_view.report(history.runs()), elem_id="throughput-report")
    controls = _Controls(notice=notice, view=view, download=download, measure=measure, stop=stop)
    _connect(controls, service=service, history=history, runs=Runs() if runs is None else runs, tab=tab)


def _introduction() -> str:
    return (
        f"Measure asks about the sample pictures for about {SECONDS_EACH:.0f} seconds each with "
        f"{', '.join(map(str, IN_FLIGHT))} of them under way at once, as one client among others. "
        "Every run of the Batch tab is listed as well."
    )


def _connect(controls: _Controls, *, service: Service, history: RunHistory, runs: Runs, tab: Any) -> None:
    free = threading.Lock()  # two measurements at once would measure each other

    async def start(request: gr.Request) -> AsyncGenerator[list[Any]]:
        page = str(request.session_hash)
        if not free.acquire(blocking=False):
            yield [_note("Somebody else is measuring; try again in some seconds."), *[gr.skip()] * 4]
            return
        try:
            with runs.open(page, TAB) as run:
                measuring = measure(service, history, run=run, client=f"measurement of page {page}")
                async with aclosing(measuring) as lines:
                    async for line in lines:
                        shown = throughput_view.report(history.runs())
                        yield [_note(line), shown, gr.skip(), *_states(is_running=True)]
                ending = "Stopped; what is measured is kept." if run.is_stopped else "Measured."
            yield [_note(ending), *await _shown(history), *_states(is_running=False)]
        except Exception as error:
            yield [problem(*told(error)), *await _shown(history), *_states(is_running=False)]
        finally:
            free.release()

    def end(request: gr.Request) -> None:
        runs.stop(str(request.session_hash), TAB)

    async def show() -> list[Any]:
        return await _shown(history)

    controls.measure.click(start, None, controls.shown(), concurrency_limit=None, **_CLOSED)
    controls.stop.click(end, queue=False, **_CLOSED)
    if isinstance(tab, gr.Tab):  # what was run in another tab or page
        tab.select(show, None, [controls.view, controls.download], **_CLOSED)


async def _shown(history: RunHistory) -> list[Any]:
    """The report and its download."""
    runs = history.runs()
    if not runs:
        return [throughput_view.report(runs), gr.update(value=None, interactive=False)]
    path = await asyncio.to_thread(_write_report, history)
    return [throughput_view.report(runs), gr.update(value=path, interactive=True)]


def _write_report(history: RunHistory) -> str:
    text = json.dumps(history.to_dict(), indent=2, allow_nan=False) + "\n"
    return str(processing_utils.save_bytes_to_cache(text.encode(), "throughput.json", utils.get_upload_folder()))


def _note(text: str) -> str:
    return f'<p class="la-note" role="status">{escaped(text)}</p>'


def _states(*, is_running: bool) -> list[Any]:
    return [gr.update(interactive=not is_running), gr.update(interactive=is_running)]
