"""The Chat tab: one picture, questions about it, and streamed answers."""

import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import gradio as gr

from llama_adapter.app.online.service import Service
from llama_adapter.app.terminal.wording import EMBEDDED_TEXT
from llama_adapter.app.web.chat_session import ChatSession, PickedPicture, Turn, answer_turns, look
from llama_adapter.app.web.html import render
from llama_adapter.app.web.runs import Runs
from llama_adapter.app.web.suggestions import Starter, is_embedded, starters_for
from llama_adapter.app.web.uploads import Upload, place_in_uploads, upload_of
from llama_adapter.app.web.widgets import (
    DIRECT,
    PRIVATE,
    SESSION_SECONDS,
    build_settings,
    html_buttons,
    html_view,
    pressed,
    sample_name,
    sample_strip,
    sampling_of,
)

TAB: Final = "chat"
MAX_KEPT: Final = 256  # chats that survive a reload of the page; the oldest is deleted
_NOTE: Final = "Each question stands alone: the model does not see the earlier ones."
_WITHOUT: Final = "Without a picture"
_RETRY, _CLEAR = 0, 1  # indices of the buttons below the last answer


def build_chat(service: Service, *, page: gr.Blocks, samples: Sequence[Path], runs: Runs, sees_pictures: bool) -> None:
    """Lay out the tab and connect its events. Call it inside a `gr.Tab`.

    If not `sees_pictures`, all questions are asked without a picture.
    """
    events = ChatEvents(service, samples=samples, runs=runs, sees_pictures=sees_pictures)
    begun = ChatSession(is_text=not sees_pictures)
    session = gr.State(begun, time_to_live=SESSION_SECONDS)
    kept = gr.BrowserState(storage_key="llama-adapter-chat")
    with gr.Row(elem_classes="la-columns"):
        with gr.Column(scale=4, min_width=280, elem_classes="la-side", visible=sees_pictures):
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
            html_view(render("parts", "small_title", text="Sample pictures"), elem_id="chat-samples-title")
            strip = html_buttons(sample_strip(samples), elem_id="chat-samples")
        with gr.Column(scale=7, min_width=300, elem_classes="la-main"):
            log = html_buttons(conversation((), is_text=begun.is_text), elem_id="chat-log")
            with gr.Column(elem_classes="la-composer"):
                starters = html_buttons(events.offer(begun), elem_id="chat-starters")
                with gr.Row(elem_classes="la-ask"):
                    question = gr.Textbox(
                        label="Question",
                        placeholder="Ask a question",
                        show_label=False,
                        container=False,
                        scale=1,
                        min_width=120,
                        lines=1,
                        max_lines=5,
                        max_length=service.limits.max_prompt_chars,
                        elem_id="chat-question",
                    )
                    ask = gr.Button("Ask", variant="primary", elem_id="chat-ask", min_width=90, scale=0)
                    stop = gr.Button("Stop", variant="stop", visible=False, elem_id="chat-stop", min_width=90, scale=0)
                notice = html_view("", elem_id="chat-notice")
            without = gr.Checkbox(
                value=begun.is_text,
                interactive=sees_pictures,
                label=_WITHOUT,
                info="The model gets the question alone." if sees_pictures else "This model sees no pictures.",
                elem_id="chat-without",
                render=False,
            )
            settings = build_settings(without)
            html_view(render("parts", "note", text=_NOTE))

    shown = [log, starters, ask, stop]
    chosen = [session, picture, picture_line, *shown]
    # Without preprocessing, because Gradio's would open the picture. Only the last event counts: when a picture is
    # pasted, the browser first reports that the present picture is removed.
    last: dict[str, Any] = {"preprocess": False, "trigger_mode": "always_last", **DIRECT}
    picture.input(events.choose, [picture, session], chosen, **last)
    strip.click(events.choose_sample, session, chosen, **DIRECT)
    without.input(events.switch, [session, without], [session, notice, log, starters], **last)

    answered = [session, question, notice, *shown]
    asked = [picture, session, question, without, *settings]
    # The service queues the questions of all pages, so Gradio need not queue them.
    many: dict[str, Any] = {"preprocess": False, "concurrency_limit": service.limits.max_waiting, **PRIVATE}
    gr.on([question.submit, ask.click], events.ask, asked, answered, **many)
    starters.click(events.ask_suggested, asked, answered, **many)
    log.click(events.retry_or_clear, asked, answered, **many)
    stop.click(events.stop, **DIRECT)
    page.load(events.restore, [kept, session], [kept, without, *chosen], **DIRECT)


class ChatEvents:
    """Handlers of the tab's events. The state of a page is in its session.

    They get values as the browser sent them (`preprocess=False`), so they check each one.
    """

    def __init__(self, service: Service, *, samples: Sequence[Path], runs: Runs, sees_pictures: bool = True) -> None:
        self._service, self._samples, self._runs, self._sees_pictures = service, samples, runs, sees_pictures
        self._kept: OrderedDict[str, ChatSession] = OrderedDict()  # by token, a secret of one browser

    # Outputs: session, picture, line below it, log, suggestions, Ask, Stop

    def restore(self, token: Any, session: ChatSession) -> list[Any]:
        """A page was opened or reloaded: continues the last chat of this browser, which gets a new token."""
        before = self._kept.pop(token, None) if isinstance(token, str) else None
        token = secrets.token_urlsafe()
        self._kept[token] = session
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        if before is None or not session.resume(before):
            return [token, gr.skip(), session, *[gr.skip()] * 6]
        picture = session.picture
        shown = None if picture is None else picture.shown
        line = render("chat", "picture_line", picture=picture)
        return [token, session.is_text, session, shown, line, *self._shown(session)]

    def switch(self, session: ChatSession, without: Any) -> list[Any]:
        """The checkbox was changed: returns session, notice, log, suggestions."""
        self._take(without, session)
        log = gr.skip() if session.turns else conversation((), is_text=session.is_text)
        return [session, "", log, self.offer(session)]

    async def choose(self, value: Any, session: ChatSession, request: gr.Request) -> list[Any]:
        """A picture was uploaded, pasted, taken or removed."""
        return await self._choose(upload_of(value), session, page=_page(request))

    async def choose_sample(self, session: ChatSession, event: gr.EventData, request: gr.Request) -> list[Any]:
        """A sample was pressed."""
        index = pressed(event, count=len(self._samples))
        if index is None:
            return [gr.skip()] * 7
        sample = self._samples[index]
        file = Upload(path=place_in_uploads(sample), name=sample.name)
        update = await self._choose(file, session, page=_page(request), about=sample_name(sample))
        return [update[0], file.path, *update[2:]]

    async def _choose(self, file: Upload | None, session: ChatSession, *, page: str, about: str = "") -> list[Any]:
        session.wanted = file
        if file is None or session.picture is None or session.picture.source != file.path:
            self._runs.stop(page, TAB)
        preview: Any = gr.skip()
        if file is None:
            session.drop()
        else:
            looked = await look(self._service, file, client=f"page {page}", is_wanted=lambda: session.wanted == file)
            if session.wanted != file:  # another picture was chosen meanwhile
                return [gr.skip()] * 7
            line = render("chat", "picture_line", picture=looked)
            if looked.is_refused:
                session.drop()
                return [session, None, line, *self._shown(session)]
            session.choose(looked)
            session.about = session.about or about
            if looked.shown != looked.source:
                preview = looked.shown
        # Only outputs that changed: a question may have been asked meanwhile, and this update may arrive after it.
        rest = [gr.skip()] * 4 if session.turns else self._shown(session)
        return [session, preview, render("chat", "picture_line", picture=session.picture), *rest]

    # Outputs: session, question, notice, log, suggestions, Ask, Stop

    async def ask(
        self, request: gr.Request, value: Any, session: ChatSession, question: Any, without: Any, *settings: Any
    ) -> AsyncGenerator[list[Any]]:
        """Enter or Ask was pressed."""
        self._take(without, session)
        question = question.strip() if isinstance(question, str) else ""
        question = question or next((starter.text for starter in self._starters(session)), "")
        async with aclosing(self._answer(value, session, question, settings, page=_page(request))) as updates:
            async for update in updates:
                yield update

    async def ask_suggested(
        self,
        request: gr.Request,
        event: gr.EventData,
        value: Any,
        session: ChatSession,
        _: Any,
        without: Any,
        *settings: Any,
    ) -> AsyncGenerator[list[Any]]:
        """A suggested question was pressed. The text in the question box stays."""
        self._take(without, session)
        starters = self._starters(session)
        index = pressed(event, count=len(starters))
        if index is None:
            return
        asked = self._answer(value, session, starters[index].text, settings, page=_page(request))
        async with aclosing(asked) as updates:
            async for update in updates:
                yield [update[0], gr.skip(), *update[2:]]

    async def retry_or_clear(
        self,
        request: gr.Request,
        event: gr.EventData,
        value: Any,
        session: ChatSession,
        _: Any,
        without: Any,
        *settings: Any,
    ) -> AsyncGenerator[list[Any]]:
        """A button below the last answer was pressed: asks again, or deletes all questions.

        The text in the question box stays.
        """
        self._take(without, session)
        index = pressed(event, count=2)
        if index is None or not session.turns:
            return
        if index == _CLEAR:
            self._runs.stop(_page(request), TAB)
            session.clear()
            yield [session, gr.skip(), "", *self._shown(session)]
            return
        again = self._answer(value, session, session.turns[-1].question, settings, page=_page(request), is_again=True)
        async with aclosing(again) as updates:
            async for update in updates:
                yield [update[0], gr.skip(), *update[2:]]

    def stop(self, request: gr.Request) -> None:
        """End the answer. The handler that streams it then updates the page."""
        self._runs.stop(_page(request), TAB)

    def offer(self, session: ChatSession) -> str:
        """Suggested questions about the picture as HTML; in a chat without pictures, a note on such questions."""
        if not session.is_text:
            return render("parts", "chips", starters=self._starters(session))
        text = "Questions are asked without a picture."
        if not self._sees_pictures:
            text = "This model is a LLaMA without adapter, and sees no pictures."
        elif is_embedded(self._service):
            text += f" {EMBEDDED_TEXT[0].upper()}{EMBEDDED_TEXT[1:]}."
        return render("parts", "status", text=text)

    def _take(self, without: Any, session: ChatSession) -> None:
        """Set the session's mode from the value of the checkbox, which may be anything the browser sent."""
        session.is_text = without is True or not self._sees_pictures

    def _starters(self, session: ChatSession) -> tuple[Starter, ...]:
        return () if session.is_text else starters_for(self._service, about=session.about).prompts

    def _shown(self, session: ChatSession) -> list[Any]:
        """Log, suggestions, and either Ask or Stop."""
        is_busy = bool(session.turns) and session.turns[-1].is_open
        buttons = [gr.update(visible=not is_busy), gr.update(visible=is_busy)]
        return [conversation(session.turns, is_text=session.is_text), self.offer(session), *buttons]

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
        is_text = session.is_text
        picture = None if is_text else _present(value, session)
        try:
            if is_text and not question:
                raise ValueError("Write a question first")
            if not is_text and picture is None:
                raise ValueError(
                    f"Choose a picture first, wait until it is uploaded, or turn on “{_WITHOUT}” in the settings"
                )
            sampling = sampling_of(*settings)
        except ValueError as error:
            yield [session, gr.skip(), render("parts", "alert", sentence=f"{error}."), *self._shown(session)]
            return
        with self._runs.open(page, TAB) as run:
            session.begin(run, Turn(question=question, is_text=is_text), is_again=is_again)
            yield [session, "", "", *self._shown(session)]
            turns = answer_turns(
                self._service,
                run,
                picture=picture,
                question=question,
                sampling=sampling,
                client=f"page {page}",
                earlier=session.turns[:-1],
            )
            async with aclosing(turns):
                async for turn in turns:
                    if session.run is not run:  # the chat was cleared, or the next question was asked
                        return
                    session.update(turn)
                    shown = (
                        self._shown(session) if not turn.is_open else [conversation(session.turns), *[gr.skip()] * 3]
                    )
                    yield [session, gr.skip(), gr.skip(), *shown]


def conversation(turns: Sequence[Turn], *, is_text: bool = False) -> str:
    """The questions and answers as a live region for screen readers; `is_text` as in `ChatSession`."""
    return render("chat", "conversation", turns=turns, is_text=is_text)


def _page(request: gr.Request) -> str:
    return str(request.session_hash)


def _present(value: Any, session: ChatSession) -> PickedPicture | None:
    """The picture that the page shows or is about to show. Its size may not be known yet."""
    file = upload_of(value) or session.wanted
    if file is None:
        return None
    if session.picture is None or file.path not in (session.picture.source, session.picture.shown):
        session.choose(PickedPicture(source=file.path, shown=file.path, name=file.base_name))
    return session.picture
