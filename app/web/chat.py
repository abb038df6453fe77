"""The Chat tab: one picture, questions about it, streamed answers."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import gradio as gr

from llama_adapter.app.online.service import Service
from llama_adapter.app.web.chat_session import ChatSession, PickedPicture, Turn, answer_turns, look
from llama_adapter.app.web.html import render
from llama_adapter.app.web.runs import Runs
from llama_adapter.app.web.uploads import Upload, place_in_uploads, upload_of
from llama_adapter.app.web.widgets import (
    DIRECT,
    PRIVATE,
    SESSION_SECONDS,
    OnOpening,
    build_settings,
    html_buttons,
    html_view,
    pressed,
    sample_strip,
    sampling_of,
    starters_for,
)

TAB: Final = "chat"
_NOTE: Final = (
    "Each question is answered on its own: the model sees the picture and this question, not the earlier ones. "
    "The picture is encoded once and reused for further questions."
)


def build_chat(service: Service, *, samples: Sequence[Path], runs: Runs) -> list[OnOpening]:
    """Lay out the tab and connect it; called inside a `gr.Tab`."""
    events = ChatEvents(service, samples=samples, runs=runs)
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
            picture_line = html_view(render("chat", "picture_line", picture=None), elem_id="chat-picture-line")
            html_view(render("parts", "small_title", text="Sample pictures"))
            strip = html_buttons(sample_strip(samples), elem_id="chat-samples")
        with gr.Column(scale=7, min_width=300, elem_classes="la-main"):
            log = html_view(conversation(()), elem_id="chat-log")
            with gr.Column(elem_classes="la-composer"):
                starters = html_buttons(_starters(service), elem_id="chat-starters")
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
                notice = html_view("", elem_id="chat-notice")
                settings = build_settings()
            html_view(render("parts", "note", text=_NOTE))

    buttons = [ask, stop, retry, clear]
    chosen = [session, picture, picture_line, log, *buttons]
    # Not preprocessed: Gradio would open the picture. The last choice counts: pasting a picture first reports that the
    # present one is removed.
    last: dict[str, Any] = {"preprocess": False, "trigger_mode": "always_last", **DIRECT}
    picture.input(events.choose, [picture, session], chosen, **last)
    strip.click(events.choose_sample, session, chosen, **DIRECT)

    answered = [log, question, notice, session, *buttons]
    asked = [picture, session, question, *settings]
    # The service orders the questions of all pages, so they need not wait for each other here.
    many: dict[str, Any] = {"preprocess": False, "concurrency_limit": service.limits.max_waiting, **PRIVATE}
    gr.on([question.submit, ask.click], events.ask, asked, answered, **many)
    retry.click(events.retry, asked, answered, **many)
    stop.click(events.stop, **DIRECT)
    clear.click(events.clear, session, answered, **DIRECT)
    starters.click(events.start_from, None, question, **DIRECT)
    return [(starters, lambda: _starters(service))]


class ChatEvents:
    """Handlers of the tab's events. What belongs to one page is in its session.

    Values come as the browser sent them (`preprocess=False`), so each is checked here.
    """

    def __init__(self, service: Service, *, samples: Sequence[Path], runs: Runs) -> None:
        self._service, self._samples, self._runs = service, samples, runs

    # Outputs: session, picture, line below it, log, four buttons

    async def choose(self, value: Any, session: ChatSession, request: gr.Request) -> list[Any]:
        """A picture was uploaded, pasted, taken or removed."""
        return await self._choose(upload_of(value), session, page=_page(request))

    async def choose_sample(self, session: ChatSession, event: gr.EventData, request: gr.Request) -> list[Any]:
        """A sample was pressed."""
        index = pressed(event, count=len(self._samples))
        if index is None:
            return [gr.skip()] * 8
        file = Upload(path=place_in_uploads(self._samples[index]), name=self._samples[index].name)
        update = await self._choose(file, session, page=_page(request))
        return [update[0], file.path, *update[2:]]

    async def _choose(self, file: Upload | None, session: ChatSession, *, page: str) -> list[Any]:
        session.wanted, had_turns = file, bool(session.turns)
        if file is None or session.picture is None or session.picture.source != file.path:
            self._runs.stop(page, TAB)
        preview: Any = gr.skip()
        if file is None:
            session.drop()
        else:
            looked = await look(self._service, file, client=f"page {page}", is_wanted=lambda: session.wanted == file)
            if session.wanted != file:  # another one was chosen meanwhile
                return [gr.skip()] * 8
            session.choose(looked)
            if looked.shown != looked.source:
                preview = looked.shown
        # Only what changed: a question may have been asked meanwhile, and this may reach the page later.
        cleared = had_turns and not session.turns
        rest = [conversation(()), *_buttons(session)] if cleared else [gr.skip()] * 5
        return [session, preview, render("chat", "picture_line", picture=session.picture), *rest]

    # Outputs: log, question, notice, session, four buttons

    async def ask(
        self, request: gr.Request, value: Any, session: ChatSession, question: Any, *settings: Any
    ) -> AsyncGenerator[list[Any]]:
        """Enter or Ask was pressed."""
        question = question.strip() if isinstance(question, str) else ""
        async with aclosing(self._answer(value, session, question, settings, page=_page(request))) as updates:
            async for update in updates:
                yield update

    async def retry(
        self, request: gr.Request, value: Any, session: ChatSession, _: Any, *settings: Any
    ) -> AsyncGenerator[list[Any]]:
        """Ask the last question again; what is typed meanwhile stays."""
        question = session.turns[-1].question if session.turns else ""
        again = self._answer(value, session, question, settings, page=_page(request), is_again=True)
        async with aclosing(again) as updates:
            async for update in updates:
                yield [update[0], gr.skip(), *update[2:]]

    def stop(self, request: gr.Request) -> None:
        """End the answer; the handler that streams it shows that."""
        self._runs.stop(_page(request), TAB)

    def clear(self, session: ChatSession, request: gr.Request) -> list[Any]:
        """Forget the questions."""
        self._runs.stop(_page(request), TAB)
        session.clear()
        return [conversation(()), gr.skip(), "", session, *_buttons(session)]

    def start_from(self, event: gr.EventData) -> Any:
        """A suggested question was pressed."""
        prompts = starters_for(self._service).prompts
        index = pressed(event, count=len(prompts))
        return gr.skip() if index is None else prompts[index].text

    async def _answer(
        self,
        value: Any,
        session: ChatSession,
        question: str,
        settings: Sequence[Any],
        *,
        page: str,
        is_again: bool = False,
    ) -> AsyncGenerator[list[Any]]:
        picture = _present(value, session)
        try:
            if picture is None:
                raise ValueError("Choose a picture first, or wait until it is uploaded")
            if not question:
                raise ValueError("Write a question first, or choose a suggested one")
            sampling = sampling_of(*settings)
        except ValueError as error:
            yield [gr.skip(), gr.skip(), render("parts", "alert", sentence=f"{error}."), session, *_buttons(session)]
            return
        with self._runs.open(page, TAB) as run:
            session.begin(run, Turn(question=question), is_again=is_again)
            yield [conversation(session.turns), "", "", session, *_buttons(session)]
            turns = answer_turns(
                self._service, run, picture=picture, question=question, sampling=sampling, client=f"page {page}"
            )
            async with aclosing(turns):
                async for turn in turns:
                    if session.run is not run:  # cleared, or overtaken by the next question
                        return
                    session.update(turn)
                    yield [conversation(session.turns), gr.skip(), gr.skip(), session, *_buttons(session)]


def conversation(turns: Sequence[Turn]) -> str:
    """The questions and answers as a region that screen readers follow."""
    return render("chat", "conversation", turns=turns)


def _starters(service: Service) -> str:
    return render("parts", "chips", starters=starters_for(service).prompts)


def _page(request: gr.Request) -> str:
    return str(request.session_hash)


def _present(value: Any, session: ChatSession) -> PickedPicture | None:
    """The picture that the page shows or is about to show, also before it was looked at."""
    file = upload_of(value) or session.wanted
    if file is None:
        return None
    if session.picture is None or file.path not in (session.picture.source, session.picture.shown):
        session.choose(PickedPicture(source=file.path, shown=file.path, name=file.base_name))
    return session.picture


def _buttons(session: ChatSession) -> list[Any]:
    """Ask, Stop, Retry and Clear."""
    has_turns = bool(session.turns)
    is_busy = has_turns and session.turns[-1].is_open
    states = (not is_busy, is_busy, has_turns and not is_busy, has_turns)
    return [gr.update(interactive=state) for state in states]
