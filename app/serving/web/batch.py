"""The Batch tab: one question about many pictures. If it has choices, a threshold decides each answer."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import gradio as gr
from gradio import processing_utils, utils

from llama_adapter.app.captioning.decisions.rule import Rule
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.captioning.tasks.registry import question_of, tasks
from llama_adapter.app.jobs.exports.formats import to_csv, to_jsonl, to_sidecars
from llama_adapter.app.jobs.records.record import Record
from llama_adapter.app.serving.http_api.schemas import MAX_TEXTS
from llama_adapter.app.serving.online.service import Service
from llama_adapter.app.serving.web.batch_files import MAX_PICTURES, BatchFiles
from llama_adapter.app.serving.web.batch_run import BatchRun, Result
from llama_adapter.app.serving.web.batch_view import MAX_CARDS, State, cards, decisions, failures, progress_view
from llama_adapter.app.serving.web.html import alert, render, told
from llama_adapter.app.serving.web.runs import Run, Runs
from llama_adapter.app.serving.web.suggestions import is_embedded, starters
from llama_adapter.app.serving.web.uploads import MAX_UPLOAD_BYTES, Upload, place_in_uploads
from llama_adapter.app.serving.web.widgets import (
    DIRECT,
    PRIVATE,
    SESSION_SECONDS,
    OnOpening,
    build_settings,
    html_buttons,
    html_list,
    html_picker,
    html_view,
    picked,
    pressed,
    sample_strip,
    sampling_of,
    share_slider,
)
from llama_adapter.llm.engine.sampling_params import SamplingParams

TAB: Final = "batch"
MAX_RUNS_AT_ONCE: Final = 8  # over all pages
MAX_FILES: Final = 5_000  # of one page, with those of a folder that are no pictures
MAX_LISTED: Final = 200  # files whose names are shown
_DOWNLOADS: Final = (
    ("JSON lines", "jsonl", to_jsonl),
    ("CSV", "csv", to_csv),
    ("Text (zip)", "zip", to_sidecars),
)
_RULE: Final = Rule()


class BatchSession:
    """The answers that a page shows. They are kept so that a new rule can decide them without asking again."""

    def __init__(self) -> None:
        self.rule = _RULE
        self.files: list[Upload] = []
        self.begin()

    def add(self, files: Sequence[Upload]) -> int:
        """Add files that are not there yet; returns how many are over the limit."""
        files = list(dict.fromkeys([*self.files, *files]))
        self.files = files[:MAX_FILES]
        return len(files) - len(self.files)

    def begin(self, choices: tuple[str, ...] = ()) -> "Shown":
        """Delete the answers and start a new list."""
        self.shown = Shown(choices)
        return self.shown


class Shown:
    """The results of one run, in the order in which they were answered. Only the newest keep their thumbnails."""

    def __init__(self, choices: tuple[str, ...]) -> None:
        self.choices = choices  # empty: answers are free text
        self.has_begun = False  # whether the page shows a run
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
            failures(self.results),
            cards(self._newest, num_answered=num_answered, rule=rule),
        ]


def build_batch(service: Service, *, samples: Sequence[Path], runs: Runs) -> list[OnOpening]:
    """Lay out the tab and connect its events. Call it inside a `gr.Tab`."""
    events, limits = BatchEvents(service, samples=samples, runs=runs), service.limits
    session = gr.State(BatchSession(), time_to_live=SESSION_SECONDS)
    with gr.Row(elem_classes="la-columns", elem_id="batch-columns"):
        with gr.Column(scale=4, min_width=280, elem_classes="la-side"):
            files = html_picker(events.files(BatchSession()), elem_id="batch-files")
            html_view(render("parts", "small_title", text="Add samples"), elem_id="batch-samples-title")
            strip = html_buttons(sample_strip(samples), elem_id="batch-samples")
            question = gr.Textbox(
                label="Instruction or question",
                placeholder="Empty: the model's own caption prompt",
                lines=1,
                max_lines=5,
                elem_id="batch-question",
            )
            boxes = [
                gr.Textbox(
                    label=widget.label,
                    info=widget.info,
                    max_lines=1,
                    elem_id=f"batch-{option.name}",
                )
                for option in events.options
                if (widget := option.widget) is not None
            ]
            starters = html_buttons(_starters(service), elem_id="batch-starters")
            with gr.Row(elem_classes="la-buttons la-composer"):
                start = gr.Button("Start", variant="primary", elem_id="batch-start", min_width=90)
                cancel = gr.Button("Cancel", variant="stop", visible=False, elem_id="batch-cancel", min_width=90)
                clear = gr.Button("Clear", elem_id="batch-clear", min_width=70)
            settings = build_settings()
            html_view(render("batch", "limits", max_pictures=MAX_PICTURES, limits=limits))
        with gr.Column(scale=7, min_width=300, elem_classes="la-main"):
            progress = html_view(render("batch", "empty", num_files=0), elem_id="batch-progress")
            with gr.Row(elem_classes="la-buttons"):
                downloads = [
                    gr.DownloadButton(
                        label, visible=False, size="md", min_width=110, elem_id=f"batch-download-{suffix}"
                    )
                    for label, suffix, _ in _DOWNLOADS
                ]
            with gr.Column(visible=False, elem_id="batch-rule", elem_classes="la-main") as rule:
                with gr.Row():
                    info = "Probability that decides for a choice."
                    threshold = share_slider("Threshold", value=_RULE.threshold, info=info)
                    info = "Width around it without a decision."
                    band = share_slider("Undecided band", value=_RULE.band, info=info)
                decided = html_view("", elem_id="batch-decisions")
            lists = [decided, html_list(elem_id="batch-failed"), html_list(elem_id="batch-cards")]

    sliders = [threshold, band]
    shown = [progress, *lists, *downloads, start, cancel, clear, session]
    raw: dict[str, Any] = {"preprocess": False, **PRIVATE}
    latest: dict[str, Any] = {"preprocess": False, "trigger_mode": "always_last", **DIRECT}
    asked = [session, question, *sliders, *boxes, *settings]
    start.click(events.start, asked, shown, concurrency_limit=None, **raw)
    cancel.click(events.cancel, **DIRECT)
    clear.click(events.clear, session, [files, *shown], **DIRECT)
    listed, each = [session, files, progress], {"trigger_mode": "multiple", **DIRECT}
    files.upload(events.add, session, listed, **each)
    files.clear(events.remove, session, listed, **each)
    strip.click(events.add_sample, session, listed, **each)
    starters.click(events.start_from, None, [question, *boxes], **DIRECT)
    gr.on([box.change for box in boxes], events.show_rule, boxes, rule, **latest)
    gr.on([threshold.change, band.change], events.decide, [session, *sliders], lists, **latest)
    return [(starters, lambda: _starters(service))]


def _starters(service: Service) -> str:
    return render("parts", "chips", starters=starters(is_embedded=is_embedded(service)).questions)


class BatchEvents:
    """Handlers of the tab's events. They get values as the browser sent them, so they check each one."""

    def __init__(self, service: Service, *, samples: Sequence[Path], runs: Runs) -> None:
        self._service, self._samples, self._runs = service, samples, runs
        self._free = threading.BoundedSemaphore(MAX_RUNS_AT_ONCE)
        offered = [(option, entry) for entry in tasks() for option in entry.options if option.widget is not None]
        self.options = [option for option, _ in offered]  # each has a text box
        self._judged = [entry.has_probabilities for _, entry in offered]

    async def start(
        self, request: gr.Request, session: BatchSession, question: Any, threshold: Any, band: Any, *values: Any
    ) -> AsyncGenerator[list[Any]]:
        """Start was pressed: yields updates of the page until the downloads are written.

        `values` are the texts of the options, then the settings of answers.
        """
        page, chosen = str(request.session_hash), tuple(session.files)
        if not self._free.acquire(blocking=False):
            problem = f"{MAX_RUNS_AT_ONCE} batches are running, which is the limit."
            yield _update(session, progress=alert(problem, "try again when one of them has ended"))
            return
        try:
            asked = self._question(question, values[: len(self.options)])
            sampling = sampling_of(*values[len(self.options) :])
            if not chosen:
                raise ValueError("Add pictures, a folder or a zip first")
            session.rule = _rule(threshold, band)
            with self._runs.open(page, TAB) as run:
                async with aclosing(self._run(session, chosen, asked, sampling, run=run, page=page)) as updates:
                    async for update in updates:
                        yield update
        except Exception as error:
            yield _update(session, progress=alert(*told(error)), is_running=False)
        finally:
            self._free.release()

    def cancel(self, request: gr.Request) -> None:
        """End the run. The handler that streams it then updates the page."""
        self._runs.stop(str(request.session_hash), TAB)

    def clear(self, session: BatchSession) -> list[Any]:
        """Delete the files and the answers from the page."""
        session.files = []
        shown = session.begin()
        paths = [None] * len(_DOWNLOADS)
        update = _update(
            session, progress=render("batch", "empty", num_files=0), shown=shown, paths=paths, is_running=False
        )
        return [self.files(session), *update]

    def files(self, session: BatchSession, *, problems: Sequence[str] = (), is_taken: bool = True) -> str:
        """The files to ask about, the buttons to add more, and what is wrong with files that were chosen."""
        return render(
            "batch",
            "files",
            files=[file.name for file in session.files[:MAX_LISTED]],
            num_files=len(session.files),
            problems=problems,
            is_taken=is_taken,
            max_bytes=max(MAX_UPLOAD_BYTES, self._service.limits.max_picture_bytes),
            max_files=MAX_FILES,
        )

    # Outputs: session, files, progress

    def add(self, session: BatchSession, event: gr.EventData) -> list[Any]:
        """Files were uploaded. A file that is there already is not added again."""
        files, problems = picked(event)
        left_out = session.add(files)
        if left_out:
            problems.append(f"A batch takes {MAX_FILES:,} files; {left_out:,} more left out.")
        return self._listed(session, problems=problems, is_taken=bool(files))

    def remove(self, session: BatchSession, event: gr.EventData) -> list[Any]:
        """A file was removed from the list."""
        index = pressed(event, count=len(session.files))
        if index is not None:
            del session.files[index]
        return self._listed(session)

    def add_sample(self, session: BatchSession, event: gr.EventData) -> list[Any]:
        """A sample was pressed."""
        index = pressed(event, count=len(self._samples))
        if index is not None:
            sample = self._samples[index]
            session.add([Upload(path=place_in_uploads(sample), name=sample.name)])
        return self._listed(session)

    def _listed(self, session: BatchSession, **told: Any) -> list[Any]:
        """Before the first run, the progress shows how many files there are."""
        count = render("batch", "empty", num_files=len(session.files))
        return [session, self.files(session, **told), gr.skip() if session.shown.has_begun else count]

    def start_from(self, event: gr.EventData) -> list[Any]:
        """A suggested question was pressed: fills in the question and its options."""
        offer = starters(is_embedded=is_embedded(self._service))
        index = pressed(event, count=len(offer.questions))
        if index is None:
            return [gr.skip()] * (1 + len(self.options))
        return [offer.questions[index].text, *(offer.texts.get(option.name, "") for option in self.options)]

    def show_rule(self, *texts: Any) -> Any:
        """An option was changed: shows the rule's sliders only if the task has probabilities."""
        given = [isinstance(text, str) and bool(text.strip()) for text in texts]
        return gr.update(
            visible=any(is_given and judged for is_given, judged in zip(given, self._judged, strict=False))
        )

    def decide(self, session: BatchSession, threshold: Any, band: Any) -> list[Any]:
        """A slider was moved: applies the new rule to the answers, without asking again."""
        session.rule = _rule(threshold, band)
        return session.shown.lists(session.rule)

    def _question(self, question: Any, texts: Sequence[Any]) -> Question:
        """The question with its options. Raises ValueError if an option refuses its text."""
        given = [text.strip() if isinstance(text, str) else "" for text in (question, *texts)]
        values: dict[str, Any] = {"instruction": given[0] or None}
        values |= {
            option.name: option.parse(text) for option, text in zip(self.options, given[1:], strict=True) if text
        }
        asked = question_of(values)
        if (count := len(asked.task.continuations)) > MAX_TEXTS:
            raise ValueError(f"Give at most {MAX_TEXTS} choices, got {count:,}")
        return asked

    async def _run(
        self,
        session: BatchSession,
        chosen: Sequence[Upload],
        question: Question,
        sampling: SamplingParams,
        *,
        run: Run,
        page: str,
    ) -> AsyncGenerator[list[Any]]:
        """One run, from opening the files to its downloads."""
        shown = session.begin(question.task.continuations)
        shown.has_begun = True
        history = self._runs.history(page)
        yield _update(session, progress=render("batch", "opening"), shown=shown, is_running=True)
        with closing(await asyncio.to_thread(BatchFiles, chosen, limits=self._service.limits)) as files:
            batch = BatchRun(
                self._service,
                files.pictures,
                question=question,
                sampling=sampling,
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
        figures = batch.figures()
        if figures.num_pictures:
            history.append(figures)
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
    """Values for the outputs of a run. Outputs whose argument is None stay. A new run removes earlier downloads."""
    lists = [gr.skip()] * 3 if shown is None else shown.lists(session.rule)
    if paths is not None:
        downloads: list[Any] = [gr.update(value=path, visible=path is not None) for path in paths]
    elif is_running:
        downloads = [gr.update(value=None, visible=False) for _ in _DOWNLOADS]
    else:
        downloads = [gr.skip() for _ in _DOWNLOADS]
    states = (not is_running, is_running, not is_running)
    buttons = [gr.skip() if is_running is None else gr.update(visible=state) for state in states]
    return [progress, *lists, *downloads, *buttons, session]


def _rule(threshold: Any, band: Any) -> Rule:
    """The rule of the sliders' values, clamped to their range. A value that is not a number becomes the default."""
    return Rule(threshold=_share(threshold, default=_RULE.threshold), band=_share(band, default=_RULE.band))


def _share(value: Any, *, default: float) -> float:
    if not isinstance(value, (int, float)) or value != value:  # not a number
        return default
    return float(min(max(value, 0.0), 1.0))  # clamped first: an integer may be too large for a float


def _write_downloads(records: Sequence[Record], run_id: str) -> list[str]:
    """Write the files of `_DOWNLOADS` into the folder of uploads, which the page may serve."""
    folder = utils.get_upload_folder()
    return [
        str(processing_utils.save_bytes_to_cache(make(records), f"answers-{run_id}.{suffix}", folder))
        for _, suffix, make in _DOWNLOADS
    ]
