"""The Batch tab: many files, a folder or a zip, answered one after another. Layout and events; HTML is batch_view's."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

import gradio as gr
from gradio import processing_utils, utils

from llama_adapter.app.calibration.decisions import parse_choices
from llama_adapter.app.exports.formats import to_csv, to_jsonl, to_sidecars
from llama_adapter.app.measuring.throughput import history_of
from llama_adapter.app.online.service import Service
from llama_adapter.app.records.record import Record
from llama_adapter.app.web import batch_view
from llama_adapter.app.web.batch_files import MAX_PICTURES, BatchFiles, Upload, uploads_of
from llama_adapter.app.web.batch_run import BatchRun
from llama_adapter.app.web.batch_types import Question, Result
from llama_adapter.app.web.picture_input import plain
from llama_adapter.app.web.runs import Run, Runs
from llama_adapter.app.web.settings import SettingsControls, build_settings, sampling_of
from llama_adapter.app.web.troubles import told
from llama_adapter.app.web.uploads import uploaded

TAB: Final = "batch"
MAX_RUNS_AT_ONCE: Final = 8  # of all pages
_CLOSED: Final[dict[str, Any]] = {"api_visibility": "private", "show_progress": "hidden"}
_FULL: Final = f"{MAX_RUNS_AT_ONCE} batches are under way, and no more run at once."
_DOWNLOADS: Final = (
    ("JSON lines", "jsonl", to_jsonl),
    ("CSV", "csv", to_csv),
    ("Text files (zip)", "zip", to_sidecars),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Controls:
    files: gr.File
    folder: gr.UploadButton
    folder_line: gr.HTML
    instruction: gr.Textbox
    choices: gr.Textbox
    settings: SettingsControls
    start: gr.Button
    cancel: gr.Button
    clear: gr.Button
    progress: gr.HTML
    downloads: list[gr.DownloadButton]
    cards: gr.HTML
    table: gr.HTML

    def shown(self) -> list[Any]:
        """The outputs of a run, in the order of `_update`."""
        return [self.progress, self.cards, self.table, *self.downloads, self.start, self.cancel, self.clear]


def build_batch(service: Service, *, runs: Runs | None = None) -> None:
    """Lay the tab out and connect it; called inside a `gr.Tab`. `runs` are stopped when their page is left."""
    controls = _lay_out(service)
    _connect(controls, service=service, runs=Runs() if runs is None else runs)


def _lay_out(service: Service) -> _Controls:
    with gr.Row(elem_classes="la-columns"):
        with gr.Column(scale=4, min_width=280, elem_classes="la-side"):
            inputs = _lay_out_inputs(service)
        with gr.Column(scale=7, min_width=300, elem_classes="la-main"):
            progress = plain(batch_view.empty(), elem_id="batch-progress")
            with gr.Row(elem_classes="la-buttons"):
                downloads = [
                    gr.DownloadButton(
                        label, interactive=False, size="md", min_width=110, elem_id=f"batch-download-{suffix}"
                    )
                    for label, suffix, _ in _DOWNLOADS
                ]
            cards = _list(elem_id="batch-cards")
            table = _list(elem_id="batch-table")
    return _Controls(**inputs, progress=progress, downloads=downloads, cards=cards, table=table)


def _list(*, elem_id: str) -> gr.HTML:
    """HTML in pieces: of a list only the strings that change travel to the browser."""
    return gr.HTML([], html_template="${value.join('')}", js_on_load=None, elem_id=elem_id, apply_default_css=False)


def _lay_out_inputs(service: Service) -> dict[str, Any]:
    files = gr.File(
        label="Pictures, or zips of pictures", file_count="multiple", height=210, elem_id="batch-files", buttons=[]
    )
    limits = service.limits
    line = batch_view.limits_line(
        max_pictures=MAX_PICTURES, max_bytes=limits.max_picture_bytes, max_pixels=limits.max_pixels
    )
    plain(line)
    folder = gr.UploadButton("Add a folder", file_count="directory", size="md", elem_id="batch-folder")
    folder_line = plain("", elem_id="batch-folder-line")
    instruction = gr.Textbox(
        label="Instruction or question",
        placeholder="Leave empty for the model's own caption prompt",
        lines=2,
        max_lines=5,
        max_length=service.limits.max_prompt_chars,
        elem_id="batch-instruction",
    )
    choices = gr.Textbox(
        label="Choices (optional)",
        info="Apart by commas, such as: yes, no. Then each answer is the likeliest of them.",
        max_lines=1,
        max_length=2_000,
        elem_id="batch-choices",
    )
    settings = build_settings()
    with gr.Row(elem_classes="la-buttons"):
        start = gr.Button("Start", variant="primary", elem_id="batch-start", min_width=90)
        cancel = gr.Button("Cancel", variant="stop", interactive=False, elem_id="batch-cancel", min_width=70)
        clear = gr.Button("Clear", elem_id="batch-clear", min_width=70)
    return {
        "files": files,
        "folder": folder,
        "folder_line": folder_line,
        "instruction": instruction,
        "choices": choices,
        "settings": settings,
        "start": start,
        "cancel": cancel,
        "clear": clear,
    }


def _connect(controls: _Controls, *, service: Service, runs: Runs) -> None:
    free = threading.BoundedSemaphore(MAX_RUNS_AT_ONCE)

    async def start(
        request: gr.Request, files: Any, folder: Any, instruction: Any, choices: Any, *settings: Any
    ) -> AsyncGenerator[list[Any]]:
        page, chosen = str(request.session_hash), (uploads_of(files), uploads_of(folder))
        if not free.acquire(blocking=False):
            yield _update(progress=batch_view.problem(_FULL, "try again when one of them has ended"))
            return
        try:
            question = _question(service, instruction=instruction, choices=choices, settings=settings)
            if not any(chosen):
                raise ValueError("Add pictures, a folder or a zip first")
            with runs.open(page, TAB) as run:
                running = _run(service, chosen, question=question, run=run, page=page)
                async with aclosing(running) as updates:
                    async for update in updates:
                        yield update
        except Exception as error:
            yield _update(progress=batch_view.problem(*told(error)), is_running=False)
        finally:
            free.release()

    def cancel(request: gr.Request) -> None:
        runs.stop(str(request.session_hash), TAB)

    def clear() -> list[Any]:
        update = _update(progress=batch_view.empty(), lists=([], []), paths=[None] * 3, is_running=False)
        return [None, None, "", *update]

    def show_folder(folder: Any) -> str:
        return batch_view.folder_line(len(uploads_of(folder)))

    inputs = [controls.files, controls.folder, controls.instruction, controls.choices, *controls.settings.as_inputs()]
    cleared = [controls.files, controls.folder, controls.folder_line, *controls.shown()]
    # Unprocessed: Gradio would make an empty file for every upload, and forget its name.
    raw: dict[str, Any] = {"preprocess": False, **_CLOSED}
    controls.start.click(start, inputs, controls.shown(), concurrency_limit=None, **raw)
    controls.cancel.click(cancel, queue=False, **_CLOSED)
    controls.clear.click(clear, None, cleared, queue=False, **_CLOSED)
    controls.folder.upload(show_folder, controls.folder, controls.folder_line, queue=False, **raw)


async def _run(
    service: Service,
    chosen: tuple[Sequence[Upload], Sequence[Upload]],
    *,
    question: Question,
    run: Run,
    page: str,
) -> AsyncGenerator[list[Any]]:
    """One run from the files that were chosen to its downloads, as updates of the page."""
    yield _update(progress=batch_view.beginning(), lists=([], []), is_running=True)
    with await asyncio.to_thread(BatchFiles, *chosen, find=uploaded, limits=service.limits) as files:
        batch = BatchRun(
            service,
            files.pictures,
            question=question,
            run=run,
            client=f"batch of page {page}",
            num_pictures=len(files.pictures),
            has_thumbnails=True,
        )
        async with aclosing(_follow(batch, service=service, notes=files.notes)) as updates:
            async for update in updates:
                yield update


def _question(service: Service, *, instruction: Any, choices: Any, settings: Sequence[Any]) -> Question:
    """What the page asks. Raises ValueError for settings out of range, and UnavailableError without a model."""
    text = instruction.strip() if isinstance(instruction, str) else ""
    typed = choices.strip() if isinstance(choices, str) else ""
    return Question(
        prompt=text or service.info.default_prompt,
        choices=parse_choices(typed) if typed else None,
        sampling=sampling_of(*settings),
    )


async def _follow(batch: BatchRun, *, service: Service, notes: Sequence[str]) -> AsyncGenerator[list[Any]]:
    """What the page shows of a run, from its first tick to its downloads."""
    results: list[Result] = []
    newest: deque[Result] = deque(maxlen=batch_view.MAX_CARDS)
    trouble = ""
    try:
        async with aclosing(batch.results()) as ticks:
            async for new in ticks:
                results += [replace(result, thumbnail=None) for result in new]  # these are kept to the end
                newest.extend(result for result in new if result.record["error"] is None)
                yield _update(
                    progress=batch_view.progress_view(batch.progress, state="running", notes=notes),
                    lists=_lists(results, newest) if new else None,
                )
    except Exception as error:
        trouble = " ".join(told(error)).strip()
    figures = batch.figures(kind="batch")
    if figures.num_pictures:
        history_of(service).add(figures)
    records = [result.record for result in sorted(results, key=lambda result: result.index)]
    paths = await asyncio.to_thread(_write_downloads, records, batch.run_id) if records else None
    is_whole = batch.progress.num_done == batch.progress.num_pictures
    yield _update(
        progress=batch_view.progress_view(
            batch.progress,
            state="failed" if trouble else "done" if is_whole else "cancelled",
            notes=notes,
            trouble=trouble,
        ),
        lists=_lists(results, newest),
        paths=paths,
        is_running=False,
    )


def _lists(results: Sequence[Result], newest: Sequence[Result]) -> tuple[list[str], list[str]]:
    num_answered = sum(result.record["error"] is None for result in results)
    return batch_view.cards(newest, num_answered=num_answered), batch_view.table(results)


def _update(
    *,
    progress: str,
    lists: tuple[list[str], list[str]] | None = None,
    paths: Sequence[str | None] | None = None,
    is_running: bool | None = None,
) -> list[Any]:
    """Values for `_Controls.shown`; what is None stays. A run that begins takes the downloads of the last one away."""
    if paths is not None:
        downloads: list[Any] = [gr.update(value=path, interactive=path is not None) for path in paths]
    elif is_running:
        downloads = [gr.update(value=None, interactive=False) for _ in _DOWNLOADS]
    else:
        downloads = [gr.skip() for _ in _DOWNLOADS]
    shown = (gr.skip(), gr.skip()) if lists is None else lists
    if is_running is None:
        return [progress, *shown, *downloads, *(gr.skip() for _ in range(3))]
    states = (not is_running, is_running, not is_running)
    return [progress, *shown, *downloads, *(gr.update(interactive=state) for state in states)]


def _write_downloads(records: Sequence[Record], run_id: str) -> list[str]:
    """The files of `_DOWNLOADS`, where the page may serve them from."""
    folder = utils.get_upload_folder()
    return [
        str(processing_utils.save_bytes_to_cache(make(records), f"answers-{run_id}.{suffix}", folder))
        for _, suffix, make in _DOWNLOADS
    ]
