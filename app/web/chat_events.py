"""What happens in the Chat tab: a picture is chosen, a question asked, stopped, asked again. No layout."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import gradio as gr

from llama_adapter.app.online.service import Service
from llama_adapter.app.web import chat_run
from llama_adapter.app.web.chat_state import ChatSession, PickedPicture, Turn
from llama_adapter.app.web.chat_view import conversation, picture_line
from llama_adapter.app.web.escaping import alert
from llama_adapter.app.web.looking import File, file_of, look
from llama_adapter.app.web.offers import offered
from llama_adapter.app.web.picture_input import picked, sample_upload
from llama_adapter.app.web.runs import Runs
from llama_adapter.app.web.settings import sampling_of

TAB = "chat"


class ChatEvents:
    """Handlers of one page's events; what belongs to one visitor is in the session that each of them gets.

    Values come as the browser sent them (`preprocess=False`), so each is looked at here.
    """

    def __init__(self, service: Service, *, samples: Sequence[Path], runs: Runs) -> None:
        self._service, self._samples, self._runs = service, samples, runs

    # A picture: session, picture, line below it, log, four buttons

    async def choose(self, value: Any, session: ChatSession, request: gr.Request) -> list[Any]:
        """A picture was uploaded, pasted, taken, or taken away."""
        return await self._choose(file_of(value), session, page=_page(request))

    async def choose_sample(self, session: ChatSession, event: gr.EventData, request: gr.Request) -> list[Any]:
        """A sample was pressed."""
        index = picked(event, count=len(self._samples))
        if index is None:
            return [gr.skip()] * 8
        path = sample_upload(self._samples, index)
        update = await self._choose((path, self._samples[index].name), session, page=_page(request))
        return [update[0], path, *update[2:]]

    async def _choose(self, file: File | None, session: ChatSession, *, page: str) -> list[Any]:
        session.wanted, had_turns = file, bool(session.chat.turns)
        if file is None or session.chat.picture is None or session.chat.picture.source != file[0]:
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
        # Only what changed: somebody may have asked while it was looked at, and this may reach the page later.
        cleared = had_turns and not session.chat.turns
        rest = [conversation(session.chat), *_idle(session)] if cleared else [gr.skip()] * 5
        return [session, preview, picture_line(session.chat), *rest]

    # A question: log, question box, notice, session, four buttons

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
        """The last question once more; what is typed meanwhile stays."""
        question = session.chat.turns[-1].question if session.chat.turns else ""
        again = self._answer(value, session, question, settings, page=_page(request), is_again=True)
        async with aclosing(again) as updates:
            async for update in updates:
                yield [update[0], gr.skip(), *update[2:]]

    def stop(self, request: gr.Request) -> None:
        """The answer ends with what there is; the handler that streams it shows that."""
        self._runs.stop(_page(request), TAB)

    def clear(self, session: ChatSession, request: gr.Request) -> list[Any]:
        """Forget the questions."""
        self._runs.stop(_page(request), TAB)
        session.clear()
        return [conversation(session.chat), gr.skip(), "", session, *_idle(session)]

    def start_from(self, event: gr.EventData) -> Any:
        """A question to start from was pressed."""
        prompts = offered(self._service).prompts
        index = picked(event, count=len(prompts))
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
                raise ValueError("Choose a picture first, or wait until it has arrived")
            if not question:
                raise ValueError("Write a question first, or press one of those above")
            sampling = sampling_of(*settings)
        except ValueError as error:
            yield [gr.skip(), gr.skip(), alert(f"{error}."), session, *_idle(session)]
            return
        with self._runs.open(page, TAB) as run:
            session.begin(run, Turn(question=question), is_again=is_again)
            yield [conversation(session.chat), "", "", session, *_busy()]
            turns = chat_run.ask(
                self._service, run, picture=picture, question=question, sampling=sampling, client=f"page {page}"
            )
            async with aclosing(turns):
                async for turn in turns:
                    if session.run is not run:  # cleared, or overtaken
                        return
                    session.chat = session.chat.with_last(turn)
                    buttons = _busy() if turn.is_open else _idle(session)
                    yield [conversation(session.chat), gr.skip(), gr.skip(), session, *buttons]


def _page(request: gr.Request) -> str:
    return str(request.session_hash)


def _present(value: Any, session: ChatSession) -> PickedPicture | None:
    """The picture that the page shows, or is about to, also where nobody has looked at it."""
    file = file_of(value) or session.wanted
    if file is None:
        return None
    if session.chat.picture is None or file[0] not in (session.chat.picture.source, session.chat.picture.shown):
        session.choose(PickedPicture(source=file[0], shown=file[0], name=file[1]))
    return session.chat.picture


def _idle(session: ChatSession) -> list[Any]:
    """Ask, Stop, Retry and Clear when nothing is under way."""
    has_turns = bool(session.chat.turns)
    return [gr.update(interactive=state) for state in (True, False, has_turns, has_turns)]


def _busy() -> list[Any]:
    return [gr.update(interactive=state) for state in (False, True, False, True)]
