"""The Batch tab: one question about many pictures, with decisions by a threshold where it has choices."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import gradio as gr
from gradio import processing_utils, utils
from gradio.components import Component

from llama_adapter.app.calibration.decisions import Rule, parse_choices
from llama_adapter.app.exports.formats import to_csv, to_jsonl, to_sidecars
from llama_adapter.app.measuring.throughput import history_of
from llama_adapter.app.online.service import Service
from llama_adapter.app.records.record import Record
from llama_adapter.app.web.batch_files import MAX_PICTURES, BatchFiles
from llama_adapter.app.web.batch_run import BatchRun, Question, Result
from llama_adapter.app.web.batch_view import MAX_CARDS, State, cards, decisions, progress_view, table
from llama_adapter.app.web.html import counted, render, told
from llama_adapter.app.web.runs import Run, Runs
from llama_adapter.app.web.uploads import Upload, place_in_uploads, uploads_of
from llama_adapter.app.web.widgets import (
    DIRECT,
    PRIVATE,
    SESSION_SECONDS,
    OnOpening,
    build_settings,
    html_buttons,
    html_list,
    html_view,
    pressed,
    sample_strip,
    sampling_of,
    starters_for,
)

TAB: Final = "batch"
MAX_RUNS_AT_ONCE: Final = 8  # of all pages
_DOWNLOADS: Final = (
    ("JSON lines", "jsonl", to_jsonl),
    ("CSV", "csv", to_csv),
    ("Text (zip)", "zip", to_sidecars),
)
_RULE: Final = Rule()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inputs:
    files: gr.File
    folder: gr.UploadButton
    folder_line: gr.HTML
    samples: gr.HTML
    question: gr.Textbox
    starters: gr.HTML
    choices: gr.Textbox
    settings: list[Component]
    start: gr.Button
    cancel: gr.Button
    clear: gr.Button


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outputs:
    progress: gr.HTML
    downloads: list[gr.DownloadButton]
    rule: gr.Column
    threshold: gr.Slider
    band: gr.Slider
    decisions: gr.HTML
    cards: gr.HTML
    table: gr.HTML


class BatchSession:
    """The answers that a page shows, kept so that another rule decides without asking again."""

    def __init__(self) -> None:
        self.rule = _RULE
        self.begin(None)

    def begin(self, choices: tuple[str, ...] | None) -> "Shown":
        """Forget the answers and start a new list of them."""
        self.shown = Shown(choices)
        return self.shown


class Shown:
    """The results of one run, in the order of their answers. Only the newest keep their thumbnails."""

    def __init__(self, choices: tuple[str, ...] | None) -> None:
        self.choices = choices
        self.results: list[Result] = []
        self._newest: deque[Result] = deque(maxlen=MAX_CARDS)

    def add(self, results: Sequence[Result]) -> None:
        """Append new results."""
        self.results += [replace(result, thumbnail=None) for result in results]
        self._newest.extend(result for result in results if result.record["error"] is None)

    def lists(self, rule: Rule) -> list[Any]:
        """Decisions, cards and table as HTML."""
        num_answered = sum(result.record["error"] is None for result in self.results)
        return [
            decisions(self.results, self.choices, rule),
            cards(self._newest, num_answered=num_answered, rule=rule),
            table(self.results, rule=rule),
        ]


def build_batch(service: Service, *, samples: Sequence[Path], runs: Runs) -> list[OnOpening]:
    """Lay out the tab and connect it; called inside a `gr.Tab`."""
    with gr.Row(elem_classes="la-columns"):
        with gr.Column(scale=4, min_width=280, elem_classes="la-side"):
            inputs = _lay_out_inputs(service, samples=samples)
        with gr.Column(scale=7, min_width=300, elem_classes="la-main"):
            outputs = _lay_out_outputs()
    _connect(inputs, outputs, BatchEvents(service, samples=samples, runs=runs))
    return [(inputs.starters, lambda: _starters(service))]


def _lay_out_inputs(service: Service, *, samples: Sequence[Path]) -> _Inputs:
    files = gr.File(
        label="Pictures, or zips of pictures", file_count="multiple", height=180, elem_id="batch-files", buttons=[]
    )
    limits = service.limits
    html_view(
        render(
            "batch",
            "limits",
            max_pictures=MAX_PICTURES,
            max_bytes=limits.max_picture_bytes,
            max_pixels=limits.max_pixels,
        )
    )
    folder = gr.UploadButton("Add a folder", file_count="directory", size="md", elem_id="batch-folder")
    folder_line = html_view("", elem_id="batch-folder-line")
    html_view(render("parts", "small_title", text="Add sample pictures"))
    strip = html_buttons(sample_strip(samples), elem_id="batch-samples")
    question = gr.Textbox(
        label="Instruction or question",
        placeholder="Empty: the model's own caption prompt",
        lines=2,
        max_lines=5,
        max_length=limits.max_prompt_chars,
        elem_id="batch-question",
    )
    choices = gr.Textbox(
        label="Choices (optional)",
        info="Separated by commas, such as: yes, no. Each picture gets the probability of every choice.",
        max_lines=1,
        max_length=2_000,
        elem_id="batch-choices",
    )
    starters = html_buttons(_starters(service), elem_id="batch-starters")
    settings = build_settings()
    with gr.Row(elem_classes="la-buttons"):
        start = gr.Button("Start", variant="primary", elem_id="batch-start", min_width=90)
        cancel = gr.Button("Cancel", variant="stop", interactive=False, elem_id="batch-cancel", min_width=70)
        clear = gr.Button("Clear", elem_id="batch-clear", min_width=70)
    return _Inputs(
        files=files,
        folder=folder,
        folder_line=folder_line,
        samples=strip,
        question=question,
        starters=starters,
        choices=choices,
        settings=settings,
        start=start,
        cancel=cancel,
        clear=clear,
    )


def _lay_out_outputs() -> _Outputs:
    progress = html_view(render("batch", "empty"), elem_id="batch-progress")
    with gr.Row(elem_classes="la-buttons"):
        downloads = [
            gr.DownloadButton(label, interactive=False, size="md", min_width=110, elem_id=f"batch-download-{suffix}")
            for label, suffix, _ in _DOWNLOADS
        ]
    with gr.Column(visible=False, elem_id="batch-rule", elem_classes="la-main") as rule:
        with gr.Row():
            threshold = gr.Slider(
                0, 1, value=_RULE.threshold, step=0.01, label="Threshold", info="Probability that decides for a choice."
            )
            band = gr.Slider(
                0, 1, value=_RULE.band, step=0.01, label="Undecided band", info="Width around it without a decision."
            )
        decided = html_view("", elem_id="batch-decisions")
    return _Outputs(
        progress=progress,
        downloads=downloads,
        rule=rule,
        threshold=threshold,
        band=band,
        decisions=decided,
        cards=html_list(elem_id="batch-cards"),
        table=html_list(elem_id="batch-table"),
    )


def _starters(service: Service) -> str:
    return render("parts", "chips", starters=starters_for(service).questions)


def _connect(inputs: _Inputs, outputs: _Outputs, events: "BatchEvents") -> None:
    session = gr.State(BatchSession(), time_to_live=SESSION_SECONDS)
    rule = [outputs.threshold, outputs.band]
    asked = [session, inputs.files, inputs.folder, inputs.question, inputs.choices, *rule, *inputs.settings]
    lists = [outputs.decisions, outputs.cards, outputs.table]
    shown = [outputs.progress, *lists, *outputs.downloads, inputs.start, inputs.cancel, inputs.clear, session]
    # Not preprocessed: Gradio would make an empty file for every upload and forget its name.
    raw: dict[str, Any] = {"preprocess": False, **PRIVATE}
    direct: dict[str, Any] = {**raw, "queue": False}
    inputs.start.click(events.start, asked, shown, concurrency_limit=None, **raw)
    inputs.cancel.click(events.cancel, **DIRECT)
    inputs.clear.click(events.clear, session, [inputs.files, inputs.folder, inputs.folder_line, *shown], **DIRECT)
    inputs.folder.upload(events.show_folder, inputs.folder, inputs.folder_line, **direct)
    inputs.samples.click(events.add_sample, inputs.files, inputs.files, **direct)
    inputs.starters.click(events.start_from, None, [inputs.question, inputs.choices], **DIRECT)
    latest: dict[str, Any] = {"trigger_mode": "always_last", **direct}
    inputs.choices.change(events.show_rule, inputs.choices, outputs.rule, **latest)
    gr.on([outputs.threshold.change, outputs.band.change], events.decide, [session, *rule], lists, **latest)


class BatchEvents:
    """Handlers of the tab's events. Values come as the browser sent them, so each is checked here."""

    def __init__(self, service: Service, *, samples: Sequence[Path], runs: Runs) -> None:
        self._service, self._samples, self._runs = service, samples, runs
        self._free = threading.BoundedSemaphore(MAX_RUNS_AT_ONCE)

    async def start(
        self,
        request: gr.Request,
        session: BatchSession,
        files: Any,
        folder: Any,
        question: Any,
        choices: Any,
        threshold: Any,
        band: Any,
        *settings: Any,
    ) -> AsyncGenerator[list[Any]]:
        """Start was pressed: updates of the page until the downloads are written."""
        page, chosen = str(request.session_hash), (uploads_of(files), uploads_of(folder))
        if not self._free.acquire(blocking=False):
            problem = f"{MAX_RUNS_AT_ONCE} batches are running, which is the most at once."
            yield _update(session, progress=_failure(problem, "try again when one of them has ended"))
            return
        try:
            asked = self._question(question, choices, settings)
            if not any(chosen):
                raise ValueError("Add pictures, a folder or a zip first")
            session.rule = _rule(threshold, band)
            with self._runs.open(page, TAB) as run:
                async with aclosing(self._run(session, chosen, question=asked, run=run, page=page)) as updates:
                    async for update in updates:
                        yield update
        except Exception as error:
            yield _update(session, progress=_failure(*told(error)), is_running=False)
        finally:
            self._free.release()

    def cancel(self, request: gr.Request) -> None:
        """End the run; the handler that streams it shows that."""
        self._runs.stop(str(request.session_hash), TAB)

    def clear(self, session: BatchSession) -> list[Any]:
        """Forget the files and the answers."""
        shown = session.begin(None)
        paths = [None] * len(_DOWNLOADS)
        update = _update(session, progress=render("batch", "empty"), shown=shown, paths=paths, is_running=False)
        return [None, None, "", *update]

    def show_folder(self, folder: Any) -> str:
        """A folder was uploaded."""
        count = len(uploads_of(folder))
        return render("parts", "status", text=f"Folder: {counted(count, 'file')}") if count else ""

    def add_sample(self, value: Any, event: gr.EventData) -> Any:
        """A sample was pressed: one more file."""
        index = pressed(event, count=len(self._samples))
        if index is None:
            return gr.skip()
        paths = [file.path for file in uploads_of(value)]
        sample = place_in_uploads(self._samples[index])
        return paths if sample in paths else [*paths, sample]

    def start_from(self, event: gr.EventData) -> list[Any]:
        """A suggested question was pressed: it comes with its choices."""
        starters = starters_for(self._service)
        index = pressed(event, count=len(starters.questions))
        return [gr.skip()] * 2 if index is None else [starters.questions[index].text, ", ".join(starters.choices)]

    def show_rule(self, choices: Any) -> Any:
        """The choices were changed: the rule is for questions with choices."""
        return gr.update(visible=isinstance(choices, str) and bool(choices.strip()))

    def decide(self, session: BatchSession, threshold: Any, band: Any) -> list[Any]:
        """A slider was moved: decide again, without asking again."""
        session.rule = _rule(threshold, band)
        return session.shown.lists(session.rule)

    def _question(self, question: Any, choices: Any, settings: Sequence[Any]) -> Question:
        """Raises ValueError for choices or settings out of range, and UnavailableError without a model."""
        text = question.strip() if isinstance(question, str) else ""
        typed = choices.strip() if isinstance(choices, str) else ""
        return Question(
            prompt=text or self._service.info.default_prompt,
            choices=parse_choices(typed) if typed else None,
            sampling=sampling_of(*settings),
        )

    async def _run(
        self,
        session: BatchSession,
        chosen: tuple[Sequence[Upload], Sequence[Upload]],
        *,
        question: Question,
        run: Run,
        page: str,
    ) -> AsyncGenerator[list[Any]]:
        """One run, from opening the files to its downloads."""
        shown = session.begin(question.choices)
        yield _update(session, progress=render("batch", "opening"), shown=shown, is_running=True)
        with await asyncio.to_thread(BatchFiles, *chosen, limits=self._service.limits) as files:
            batch = BatchRun(
                self._service,
                files.pictures,
                question=question,
                run=run,
                client=f"batch of page {page}",
                num_pictures=len(files.pictures),
                has_thumbnails=True,
            )
            trouble = ""
            try:
                async with aclosing(batch.results()) as ticks:
                    async for new in ticks:
                        shown.add(new)
                        progress = progress_view(batch.progress, state="running", notes=files.notes)
                        yield _update(session, progress=progress, shown=shown if new else None)
            except Exception as error:
                trouble = " ".join(told(error)).strip()
        figures = batch.figures(kind="batch")
        if figures.num_pictures:
            history_of(self._service).add(figures)
        records = [result.record for result in sorted(shown.results, key=lambda result: result.index)]
        paths = await asyncio.to_thread(_write_downloads, records, batch.run_id) if records else None
        is_whole = batch.progress.num_done == batch.progress.num_pictures
        state: State = "failed" if trouble else "done" if is_whole else "cancelled"
        progress = progress_view(batch.progress, state=state, notes=files.notes, trouble=trouble)
        yield _update(session, progress=progress, shown=shown, paths=paths, is_running=False)


def _update(
    session: BatchSession,
    *,
    progress: str,
    shown: Shown | None = None,
    paths: Sequence[str | None] | None = None,
    is_running: bool | None = None,
) -> list[Any]:
    """Values for the outputs of a run; what is None stays. A new run takes the last one's downloads away."""
    lists = [gr.skip()] * 3 if shown is None else shown.lists(session.rule)
    if paths is not None:
        downloads: list[Any] = [gr.update(value=path, interactive=path is not None) for path in paths]
    elif is_running:
        downloads = [gr.update(value=None, interactive=False) for _ in _DOWNLOADS]
    else:
        downloads = [gr.skip() for _ in _DOWNLOADS]
    states = (not is_running, is_running, not is_running)
    buttons = [gr.skip() if is_running is None else gr.update(interactive=state) for state in states]
    return [progress, *lists, *downloads, *buttons, session]


def _failure(sentence: str, hint: str = "") -> str:
    return render("batch", "failure", sentence=sentence, hint=hint)


def _rule(threshold: Any, band: Any) -> Rule:
    """The sliders' values, clamped to their range; the default for what is not a number."""
    return Rule(threshold=_share(threshold, default=_RULE.threshold), band=_share(band, default=_RULE.band))


def _share(value: Any, *, default: float) -> float:
    if not isinstance(value, (int, float)) or value != value:  # not a number
        return default
    return float(min(max(value, 0.0), 1.0))  # clamped first: an integer may be too large for a float


def _write_downloads(records: Sequence[Record], run_id: str) -> list[str]:
    """Write the files of `_DOWNLOADS` where the page may serve them from."""
    folder = utils.get_upload_folder()
    return [
        str(processing_utils.save_bytes_to_cache(make(records), f"answers-{run_id}.{suffix}", folder))
        for _, suffix, make in _DOWNLOADS
    ]
