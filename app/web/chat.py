"""The Chat tab: one picture, questions about it, answers that stream. Layout and events; chat_view has the HTML."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from llama_adapter.app.online.service import Service
from llama_adapter.app.web.chat_events import ChatEvents
from llama_adapter.app.web.chat_state import ChatSession
from llama_adapter.app.web.chat_view import conversation, picture_line
from llama_adapter.app.web.offers import offered
from llama_adapter.app.web.picture_input import AT_ONCE, CLOSED, OnOpening, chips, picker, plain, sample_strip
from llama_adapter.app.web.runs import Runs
from llama_adapter.app.web.settings import SettingsControls, build_settings

SESSION_SECONDS = 6 * 3600  # an open page that nobody touches forgets its chat after that
_NOTE = (
    "Each question is answered by itself: the model sees the picture and this question, not the earlier ones. "
    "The picture is encoded once and kept for further questions."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Controls:
    session: gr.State
    picture: gr.Image
    about_picture: gr.HTML
    samples: gr.HTML
    log: gr.HTML
    chips: gr.HTML
    question: gr.Textbox
    notice: gr.HTML
    ask: gr.Button
    stop: gr.Button
    retry: gr.Button
    clear: gr.Button
    settings: SettingsControls

    def buttons(self) -> list[gr.Button]:
        return [self.ask, self.stop, self.retry, self.clear]


def build_chat(service: Service, *, samples: Sequence[Path], runs: Runs) -> list[OnOpening]:
    """Lay the tab out and connect it; called inside a `gr.Tab`."""
    controls = _lay_out(service, samples=samples)
    events = ChatEvents(service, samples=samples, runs=runs)
    _connect_picture(controls, events)
    # The service keeps the order between questions; here they need not wait for each other.
    _connect_questions(controls, events, at_once=service.limits.max_waiting)
    return [(controls.chips, lambda: _starters(service))]


def _lay_out(service: Service, *, samples: Sequence[Path]) -> _Controls:
    session = gr.State(ChatSession(), time_to_live=SESSION_SECONDS)
    with gr.Row(elem_classes="la-columns"):
        with gr.Column(scale=4, min_width=280, elem_classes="la-side"):
            picture = gr.Image(
                label="Picture",
                type="filepath",
                sources=["upload", "clipboard", "webcam"],
                height=320,
                buttons=[],
                placeholder="Drop or paste a picture\nor choose a file",
                alt_text="The picture that questions are about",
                elem_id="chat-picture",
            )
            about_picture = plain(picture_line(ChatSession().chat), elem_id="chat-picture-line")
            plain('<h3 class="la-small-title">Sample pictures</h3>')
            strip = picker(sample_strip(samples), elem_id="chat-samples")
        with gr.Column(scale=7, min_width=300, elem_classes="la-main"):
            log = plain(conversation(ChatSession().chat), elem_id="chat-log")
            with gr.Column(elem_classes="la-composer"):
                starters = picker(_starters(service), elem_id="chat-chips")
                question = gr.Textbox(
                    label="Question",
                    placeholder="Ask something about the picture",
                    lines=1,
                    max_lines=5,
                    max_length=service.limits.max_prompt_chars,
                    elem_id="chat-question",
                )
                with gr.Row(elem_classes="la-buttons"):
                    ask = gr.Button("Ask", variant="primary", elem_id="chat-ask", min_width=90)
                    stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="chat-stop", min_width=70)
                    retry = gr.Button("Retry", interactive=False, elem_id="chat-retry", min_width=70)
                    clear = gr.Button("Clear", interactive=False, elem_id="chat-clear", min_width=70)
                notice = plain("", elem_id="chat-notice")
                settings = build_settings()
            plain(f'<p class="la-note">{_NOTE}</p>')
    return _Controls(
        session=session,
        picture=picture,
        about_picture=about_picture,
        samples=strip,
        log=log,
        chips=starters,
        question=question,
        notice=notice,
        ask=ask,
        stop=stop,
        retry=retry,
        clear=clear,
        settings=settings,
    )


def _starters(service: Service) -> str:
    prompts = offered(service).prompts
    return chips([(prompt.label, prompt.text) for prompt in prompts], name="Questions to start from")


def _connect_picture(controls: _Controls, events: ChatEvents) -> None:
    shown = [controls.session, controls.picture, controls.about_picture, controls.log, *controls.buttons()]
    chosen = [controls.picture, controls.session]
    # Unprocessed: Gradio would open the picture. And what was chosen last counts: pasting one first tells that the
    # present one is taken away.
    controls.picture.input(events.choose, chosen, shown, preprocess=False, trigger_mode="always_last", **AT_ONCE)
    controls.samples.click(events.choose_sample, controls.session, shown, **AT_ONCE)


def _connect_questions(controls: _Controls, events: ChatEvents, *, at_once: int) -> None:
    shown = [controls.log, controls.question, controls.notice, controls.session, *controls.buttons()]
    asked = [controls.picture, controls.session, controls.question, *controls.settings.as_inputs()]
    many: dict[str, Any] = {"preprocess": False, "concurrency_limit": at_once, **CLOSED}
    gr.on([controls.question.submit, controls.ask.click], events.ask, asked, shown, **many)
    controls.retry.click(events.retry, asked, shown, **many)
    controls.stop.click(events.stop, **AT_ONCE)
    controls.clear.click(events.clear, controls.session, shown, **AT_ONCE)
    controls.chips.click(events.start_from, None, controls.question, **AT_ONCE)
