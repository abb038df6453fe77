"""The Chat tab: one picture, questions about it, and streamed answers."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import gradio as gr

from llama_adapter.app.jobs.wording import EMBEDDED_TEXT
from llama_adapter.app.serving.online.service import Service
from llama_adapter.app.serving.online.types import ServiceError
from llama_adapter.app.serving.web.chat_session import ChatSession, Turn, answer_turns, look
from llama_adapter.app.serving.web.html import alert, render
from llama_adapter.app.serving.web.runs import Runs
from llama_adapter.app.serving.web.suggestions import Starter, is_embedded, starters
from llama_adapter.app.serving.web.uploads import Upload, place_in_uploads
from llama_adapter.app.serving.web.widgets import (
    DIRECT,
    PRIVATE,
    SESSION_SECONDS,
    build_settings,
    html_buttons,
    html_picker,
    html_view,
    picked,
    pressed,
    sample_name,
    sample_strip,
    sampling_of,
)
from llama_adapter.vision.errors import PictureError

TAB: Final = "chat"
MAX_KEPT: Final = 256  # chats that survive a reload of the page; the oldest is deleted
MAX_FILES: Final = 8  # files of one choice, until one of them is a picture
_ALONE: Final = "Each question stands alone: the model does not see the earlier ones."
_TOGETHER: Final = "The model sees the earlier questions and answers of this chat too."
_WITHOUT: Final = "Without a picture"
_FORGOTTEN: Final = "The server no longer has the earlier questions of this tab."
# A random key of the browser's tab, which a reload and going back keep, and `+` if the tab had it before.
_TOKEN: Final = """(_, session) => {
    try {
        const key = sessionStorage.llamaAdapterChat, made = crypto.getRandomValues(new Uint32Array(4)).join('-');
        return [key ? `${key}+` : (sessionStorage.llamaAdapterChat = made), session];
    } catch {
        return [null, session]; // the browser stores nothing
    }
}"""
_RETRY, _CLEAR = 0, 1  # indices of the buttons below the last answer


def build_chat(
    service: Service,
    *,
    page: gr.Blocks,
    samples: Sequence[Path],
    runs: Runs,
    sees_pictures: bool,
    sees_earlier: bool,
) -> None:
    """Lay out the tab and connect its events. Call it inside a `gr.Tab`.

    If not `sees_pictures`, all questions are asked without a picture. With `sees_earlier`, the model gets the earlier
    ones too.
    """
    events = ChatEvents(service, samples=samples, runs=runs, sees_pictures=sees_pictures)
    begun = ChatSession(is_text=not sees_pictures)
    session = gr.State(begun, time_to_live=SESSION_SECONDS)
    kept = gr.Textbox(visible=False)
    # The style shows the samples below the picture, and the log and suggestions above the question box. In this order
    # the Tab key goes from the picture to the question box.
    with gr.Row(elem_classes=["la-columns", "la-chat"]):
        with gr.Column(elem_classes=["la-side", "la-picture"], visible=sees_pictures):
            picture = html_picker(events.picture(begun), elem_id="chat-picture")
        with gr.Column(min_width=300, elem_classes="la-main"):
            with gr.Column(elem_classes="la-composer"):
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
                        elem_id="chat-question",
                    )
                    ask = gr.Button("Ask", variant="primary", elem_id="chat-ask", min_width=90, scale=0)
                    stop = gr.Button("Stop", variant="stop", visible=False, elem_id="chat-stop", min_width=90, scale=0)
                starters = html_buttons(events.offer(begun), elem_id="chat-starters")
                notice = html_view("", elem_id="chat-notice")
            log = html_buttons(conversation((), is_text=begun.is_text), elem_id="chat-log")
            without = gr.Checkbox(
                value=begun.is_text,
                interactive=sees_pictures,
                label=_WITHOUT,
                info="The model gets the question alone." if sees_pictures else "This model sees no pictures.",
                elem_id="chat-without",
                render=False,
            )
            settings = build_settings(without)
            html_view(render("parts", "note", text=_TOGETHER if sees_earlier else _ALONE))
        with gr.Column(elem_classes=["la-side", "la-more"], visible=sees_pictures):
            html_view(render("parts", "small_title", text="Sample pictures"), elem_id="chat-samples-title")
            strip = html_buttons(sample_strip(samples), elem_id="chat-samples")

    shown = [log, starters, ask, stop]
    chosen = [session, picture, *shown, notice]
    # Of several choices the last one counts, so none may be left out while an earlier one is read.
    each: dict[str, Any] = {"trigger_mode": "multiple", **DIRECT}
    picture.upload(events.choose, session, chosen, **each)
    picture.clear(events.remove, session, chosen, **each)
    strip.click(events.choose_sample, session, chosen, **each)
    latest: dict[str, Any] = {"preprocess": False, "trigger_mode": "always_last", **DIRECT}
    without.input(events.switch, [session, without], [session, notice, log, starters], **latest)

    answered = [session, question, notice, *shown]
    asked = [session, question, without, *settings]
    # The service queues the questions of all pages, so Gradio need not queue them. Without `multiple`, it drops a press
    # between the last update of an answer and its end.
    many: dict[str, Any] = {
        **{"preprocess": False, "trigger_mode": "multiple", "concurrency_limit": service.limits.max_waiting},
        **PRIVATE,
    }
    gr.on([question.submit, ask.click], events.ask, asked, answered, **many)
    starters.click(events.ask_suggested, asked, answered, **many)
    log.click(events.retry_or_clear, asked, answered, **many)
    stop.click(events.stop, **DIRECT)
    page.load(events.restore, [kept, session], [without, *chosen], js=_TOKEN, **DIRECT)


class ChatEvents:
    """Handlers of the tab's events. The state of a page is in its session.

    They get values as the browser sent them (`preprocess=False`), so they check each one.
    """

    def __init__(self, service: Service, *, samples: Sequence[Path], runs: Runs, sees_pictures: bool = True) -> None:
        self._service, self._samples, self._runs, self._sees_pictures = service, samples, runs, sees_pictures
        self._kept: OrderedDict[str, ChatSession] = OrderedDict()  # by token, a secret of one browser

    # Outputs: session, picture, log, suggestions, Ask, Stop, notice

    def restore(self, token: Any, session: ChatSession) -> list[Any]:
        """A page was opened or reloaded: continues the chat that its tab of the browser had before."""
        if not isinstance(token, str) or not 16 <= len(token) <= 100:
            return [gr.skip()] * 8
        key = token.removesuffix("+")
        before = self._kept.pop(key, None)
        self._kept[key] = session
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        if before is None or not session.resume(before):
            is_forgotten = key != token and (before is None or bool(before.turns))
            told = render("parts", "status", text=_FORGOTTEN) if is_forgotten else gr.skip()
            return [gr.skip(), session, *[gr.skip()] * 5, told]
        shown = self._shown(session)
        shown[0] = conversation(session.turns, is_text=session.is_text, is_restored=True)
        return [session.is_text, session, self.picture(session), *shown, ""]

    def switch(self, session: ChatSession, without: Any) -> list[Any]:
        """The checkbox was changed: returns session, notice, log, suggestions."""
        session.is_text = self._is_text(without)
        log = gr.skip() if session.turns else conversation((), is_text=session.is_text)
        return [session, "", log, self.offer(session)]

    async def choose(self, session: ChatSession, event: gr.EventData, request: gr.Request) -> list[Any]:
        """Files were uploaded: shows the first picture among them. Without one, the present picture stays."""
        files, problems = picked(event)
        return await self._choose(files[:MAX_FILES], session, page=_page(request), problems=problems)

    async def choose_sample(self, session: ChatSession, event: gr.EventData, request: gr.Request) -> list[Any]:
        """A sample was pressed."""
        index = pressed(event, count=len(self._samples))
        if index is None:
            return [gr.skip()] * 7
        sample = self._samples[index]
        file = Upload(path=place_in_uploads(sample), name=sample.name)
        return await self._choose([file], session, page=_page(request), about=sample_name(sample))

    def remove(self, session: ChatSession, request: gr.Request) -> list[Any]:
        """The picture was removed, and its questions with it."""
        self._runs.stop(_page(request), TAB)
        session.drop()
        return [session, self.picture(session), *self._shown(session), ""]

    async def _choose(
        self, files: Sequence[Upload], session: ChatSession, *, page: str, problems: Sequence[str] = (), about: str = ""
    ) -> list[Any]:
        choosing = session.choosing = asyncio.get_running_loop().create_future()
        problems, notes, chosen = list(problems), [], None
        try:
            for index, file in enumerate(files):
                try:
                    chosen = await look(
                        self._service, file, client=f"page {page}", is_wanted=lambda: session.choosing is choosing
                    )
                except (PictureError, ServiceError) as error:
                    problems.append(error.message)
                if session.choosing is not choosing:  # other files were chosen meanwhile
                    return [gr.skip()] * 7
                if chosen is not None:
                    if left_out := len(files) - index - 1:
                        was = "1 more file was" if left_out == 1 else f"{left_out} more files were"
                        notes.append(f"The chat takes one picture: {was} left out. The tab Batch takes many.")
                    break
        finally:
            choosing.set_result(chosen is not None)
            if session.choosing is choosing:
                session.choosing = None
        if chosen is not None:
            if session.picture is None or session.picture.source != chosen.source:
                self._runs.stop(page, TAB)
            session.choose(chosen)
            session.about = session.about or about
        # Only outputs that changed: a question may have been asked meanwhile, and this update may arrive after it.
        rest = [gr.skip()] * 4 if session.turns or chosen is None else self._shown(session)
        view = self.picture(session, problems=problems, notes=notes, is_taken=chosen is not None)
        return [session, view, *rest, gr.skip() if chosen is None else ""]

    def picture(
        self, session: ChatSession, *, problems: Sequence[str] = (), notes: Sequence[str] = (), is_taken: bool = True
    ) -> str:
        """The picture, the buttons to choose another one, and what is wrong with files that were chosen."""
        return render(
            "chat",
            "picture",
            picture=session.picture,
            problems=problems,
            notes=notes,
            is_taken=is_taken,
            max_bytes=self._service.limits.max_picture_bytes,
            max_files=MAX_FILES,
        )

    # Outputs: session, question, notice, log, suggestions, Ask, Stop

    async def ask(
        self, request: gr.Request, session: ChatSession, question: Any, without: Any, *settings: Any
    ) -> AsyncGenerator[list[Any]]:
        """Enter or Ask was pressed."""
        question = question.strip() if isinstance(question, str) else ""
        if not question and not self._is_text(without):
            question = self._starters(session)[0].text
        async with aclosing(self._answer(request, session, question, without, settings)) as updates:
            async for update in updates:
                yield update

    async def ask_suggested(
        self, request: gr.Request, event: gr.EventData, session: ChatSession, _: Any, without: Any, *settings: Any
    ) -> AsyncGenerator[list[Any]]:
        """A suggested question was pressed. The text in the question box stays."""
        starters = () if self._is_text(without) else self._starters(session)
        index = pressed(event, count=len(starters))
        if index is None:
            yield [gr.skip()] * 7
            return
        asked = self._answer(request, session, starters[index].text, without, settings, question_box=gr.skip())
        async with aclosing(asked) as updates:
            async for update in updates:
                yield update

    async def retry_or_clear(
        self, request: gr.Request, event: gr.EventData, session: ChatSession, _: Any, without: Any, *settings: Any
    ) -> AsyncGenerator[list[Any]]:
        """A button below the last answer was pressed: asks again, or deletes all questions.

        The text in the question box stays.
        """
        index = pressed(event, count=2)
        if index is None or not session.turns:
            yield [gr.skip()] * 7
            return
        if index == _CLEAR:
            self._runs.stop(_page(request), TAB)
            session.clear()
            yield [session, gr.skip(), "", *self._shown(session)]
            return
        again, box = session.turns[-1].question, gr.skip()
        asked = self._answer(request, session, again, without, settings, is_again=True, question_box=box)
        async with aclosing(asked) as updates:
            async for update in updates:
                yield update

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

    def _is_text(self, without: Any) -> bool:
        """Whether to ask without a picture. `without` is the value of the checkbox, or anything else that was sent.

        A question is asked as the checkbox was when it was sent, and only `switch` changes the page's mode: a question
        may wait in Gradio's queue and arrive after a later change of the checkbox.
        """
        return without is True or not self._sees_pictures

    def _starters(self, session: ChatSession) -> tuple[Starter, ...]:
        return starters(is_embedded=is_embedded(self._service), about=session.about).prompts

    def _shown(self, session: ChatSession) -> list[Any]:
        """Log, suggestions, and either Ask or Stop."""
        is_busy = bool(session.turns) and session.turns[-1].is_open
        buttons = [gr.update(visible=not is_busy), gr.update(visible=is_busy)]
        return [conversation(session.turns, is_text=session.is_text), self.offer(session), *buttons]

    async def _answer(
        self,
        request: gr.Request,
        session: ChatSession,
        question: str,
        without: Any,
        settings: Sequence[Any],
        *,
        is_again: bool = False,
        question_box: Any = "",
    ) -> AsyncGenerator[list[Any]]:
        """Updates of the page while a question is answered. `question_box` is its value once the question is taken."""
        page, is_text = _page(request), self._is_text(without)
        try:
            if is_text and not question:
                raise ValueError("Write a question first")
            if not is_text and not await session.settled():
                raise ValueError("No picture was added, so the question was not sent. Send it again")
            picture = None if is_text else session.picture
            if not is_text and picture is None:
                raise ValueError(f"Choose a picture first, or turn on “{_WITHOUT}” in the settings")
            sampling = sampling_of(*settings)
        except ValueError as error:
            yield [session, gr.skip(), alert(f"{error}."), *self._shown(session)]
            return
        if session.is_asking(question) and not is_again:  # a double click
            yield [gr.skip()] * 7
            return
        with self._runs.open(page, TAB) as run:
            session.begin(run, Turn(question=question, is_text=is_text), is_again=is_again)
            yield [session, question_box, "", *self._shown(session)]
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
                    if run.is_left:
                        return  # the page was closed
                    if session.run is not run:  # the chat was cleared, or the next question was asked
                        # Gradio sends the last update once more at the end, which may be after the next answer's end.
                        shown = self._shown(session) if session.run is None else [gr.skip()] * 4
                        yield [session, gr.skip(), gr.skip(), *shown]
                        return
                    session.update(turn)
                    shown = (
                        self._shown(session) if not turn.is_open else [conversation(session.turns), *[gr.skip()] * 3]
                    )
                    yield [session, gr.skip(), gr.skip(), *shown]


def conversation(turns: Sequence[Turn], *, is_text: bool = False, is_restored: bool = False) -> str:
    """The questions and answers as a live region for screen readers; `is_text` as in `ChatSession`.

    If `is_restored`, the browser presses Retry for an answer that was interrupted.
    """
    return render("chat", "conversation", turns=turns, is_text=is_text, is_restored=is_restored)


def _page(request: gr.Request) -> str:
    return str(request.session_hash)
