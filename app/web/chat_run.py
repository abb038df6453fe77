"""Asking one question: from a picture in the upload folder to a turn that grows. Knows the service, not Gradio."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from llama_adapter.app.online.request_handle import RequestHandle
from llama_adapter.app.online.service import Ask, Service
from llama_adapter.app.tasks.answers import Answer, Event
from llama_adapter.app.web.chat_state import PickedPicture, Turn
from llama_adapter.app.web.runs import Run
from llama_adapter.app.web.troubles import told
from llama_adapter.app.web.uploads import read_upload
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.problems import describe


async def ask(
    service: Service, run: Run, *, picture: PickedPicture, question: str, sampling: SamplingParams, client: str
) -> AsyncGenerator[Turn]:
    """The turn at first, whenever there is more of it, and at its end; whatever goes wrong stands in it."""
    turn = Turn(question=question)
    yield turn
    try:
        data = await asyncio.to_thread(read_upload, picture.source, max_bytes=service.limits.max_picture_bytes)
        handle = service.submit(
            Ask(picture=data, prompt=question, label=picture.name, sampling=sampling, client=client)
        )
        run.add(handle)
        async with aclosing(in_bundles(handle)) as bundles:
            async for events in bundles:
                text = "".join(event.text for event in events if not isinstance(event, Answer))
                answer = next((event for event in events if isinstance(event, Answer)), None)
                turn = replace(turn, text=turn.text + text, answer=answer)
                yield turn
        run.discard(handle)
    except Exception as error:
        sentence, hint = told(error)
        yield replace(turn, problem=replace(describe(error), sentence=sentence, hint=hint))


async def in_bundles(handle: RequestHandle) -> AsyncGenerator[list[Event]]:
    """What is ready, together: who is slower than the engine gets more at a time. Closing it early cancels."""
    news: asyncio.Queue[Event] = asyncio.Queue()

    async def pump() -> None:
        async for event in handle:
            news.put_nowait(event)

    pumping = asyncio.create_task(pump())
    is_whole = False
    try:
        while not is_whole:
            bundle = [await news.get()]
            while not news.empty():
                bundle.append(news.get_nowait())
            is_whole = isinstance(bundle[-1], Answer)
            yield bundle
    finally:
        if not is_whole:
            handle.cancel()
        pumping.cancel()
