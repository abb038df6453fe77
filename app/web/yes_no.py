"""The Yes/No tab: one question, its possible answers, many pictures. Layout and events; yes_no_view has the HTML."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from llama_adapter.app.calibration.decisions import Rule
from llama_adapter.app.online.service import Service
from llama_adapter.app.web.chat import SESSION_SECONDS
from llama_adapter.app.web.offers import offered
from llama_adapter.app.web.picture_input import AT_ONCE, CLOSED, OnOpening, chips, picker, plain, sample_strip
from llama_adapter.app.web.runs import Runs
from llama_adapter.app.web.yes_no_events import YesNoEvents
from llama_adapter.app.web.yes_no_state import YesNoSession
from llama_adapter.app.web.yes_no_view import results

_RULE = Rule()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Controls:
    session: gr.State
    files: gr.File
    samples: gr.HTML
    question: gr.Textbox
    chips: gr.HTML
    choices: gr.Textbox
    ask: gr.Button
    stop: gr.Button
    notice: gr.HTML
    threshold: gr.Slider
    band: gr.Slider
    results: gr.HTML


def build_yes_no(service: Service, *, samples: Sequence[Path], runs: Runs) -> list[OnOpening]:
    """Lay the tab out and connect it; called inside a `gr.Tab`."""
    controls = _lay_out(service, samples=samples)
    _connect(controls, YesNoEvents(service, samples=samples, runs=runs), at_once=service.limits.max_waiting)
    return [
        (controls.chips, lambda: _starters(service)),
        (controls.question, lambda: offered(service).question),
        (controls.choices, lambda: ", ".join(offered(service).choices)),
    ]


def _lay_out(service: Service, *, samples: Sequence[Path]) -> _Controls:
    session = gr.State(YesNoSession(), time_to_live=SESSION_SECONDS)
    with gr.Row(elem_classes="la-columns"):
        with gr.Column(scale=4, min_width=280, elem_classes="la-side"):
            files = gr.File(label="Pictures, one or many", file_count="multiple", height=190, elem_id="yes-no-files")
            plain('<h3 class="la-small-title">Add sample pictures</h3>')
            strip = picker(sample_strip(samples), elem_id="yes-no-samples")
            question = gr.Textbox(
                label="Question",
                max_length=service.limits.max_prompt_chars,
                max_lines=4,
                elem_id="yes-no-question",
            )
            starters = picker(_starters(service), elem_id="yes-no-chips")
            choices = gr.Textbox(
                label="Possible answers",
                info="With commas between them.",
                max_length=1000,
                max_lines=3,
                elem_id="yes-no-choices",
            )
            with gr.Row(elem_classes="la-buttons"):
                ask = gr.Button("Ask", variant="primary", elem_id="yes-no-ask", min_width=90)
                stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="yes-no-stop", min_width=70)
            notice = plain("", elem_id="yes-no-notice")
        with gr.Column(scale=7, min_width=300, elem_classes="la-main"):
            with gr.Row():
                threshold = gr.Slider(
                    0, 1, value=_RULE.threshold, step=0.01, label="Threshold", info="From here on the first counts."
                )
                band = gr.Slider(
                    0, 1, value=_RULE.band, step=0.01, label="Undecided band", info="Around it, nothing is decided."
                )
            shown = plain(results((), (), _RULE), elem_id="yes-no-results")
    return _Controls(
        session=session,
        files=files,
        samples=strip,
        question=question,
        chips=starters,
        choices=choices,
        ask=ask,
        stop=stop,
        notice=notice,
        threshold=threshold,
        band=band,
        results=shown,
    )


def _starters(service: Service) -> str:
    questions = offered(service).questions
    return chips([(one.label, one.text) for one in questions], name="Questions to start from")


def _connect(controls: _Controls, events: YesNoEvents, *, at_once: int) -> None:
    rule = [controls.threshold, controls.band]
    asked = [controls.session, controls.files, controls.question, controls.choices, *rule]
    shown = [controls.results, controls.notice, controls.session, controls.ask, controls.stop]
    triggers = [controls.question.submit, controls.choices.submit, controls.ask.click]
    many: dict[str, Any] = {"concurrency_limit": at_once, **CLOSED}
    gr.on(triggers, events.ask, asked, shown, preprocess=False, **many)
    controls.stop.click(events.stop, **AT_ONCE)
    controls.samples.click(events.add_sample, controls.files, controls.files, preprocess=False, **AT_ONCE)
    controls.chips.click(events.start_from, None, controls.question, **AT_ONCE)
    gr.on(
        [controls.threshold.change, controls.band.change],
        events.decide_anew,
        [controls.session, *rule],
        controls.results,
        preprocess=False,
        trigger_mode="always_last",
        **AT_ONCE,
    )
