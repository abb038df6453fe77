"""Sends the answers of a service, as one body or as server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial

from fastapi.sse import EventSourceResponse
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.serving.http_api.access import visit_of
from llama_adapter.app.serving.http_api.asking import Answering, NumberedEvent, Pending
from llama_adapter.app.serving.http_api.errors import ApiError, of_answer

IGNORED_TURNS = "x-ignored-turns"
STALLED_READER_S = 30.0  # a client that reads nothing for this time is disconnected


class AnswerResponse(Response):
    """Waits for the answers and sends them. If the client hangs up or stops reading, its requests are cancelled.

    The response waits, not the route, so that FastAPI has released the request's body by then. The head of a stream is
    sent with the first event, so an error before it is answered with its own status.
    """

    def __init__(self, pending: Pending, *, is_stream: bool) -> None:
        super().__init__()
        self._pending, self._is_stream = pending, is_stream
        self._reply_headers = {IGNORED_TURNS: str(pending.num_ignored_turns)}
        self._has_hung_up = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; raises ApiError, or TimeoutError if the client stops reading."""
        listening = asyncio.create_task(self._listen(receive))
        try:
            if self._is_stream:
                async with aclosing(merged(self._pending.answering)) as events:
                    await self._send_stream(events, scope, send)
            else:
                body = await self._pending.body(partial(self._note, scope))
                await JSONResponse(body, headers=self._reply_headers)(scope, receive, send)
        except ApiError:
            if not self._has_hung_up:  # otherwise nobody reads it, and the log has the answer's own error
                raise
        finally:
            listening.cancel()
            self._pending.cancel()

    async def _send_stream(self, events: AsyncIterator[NumberedEvent], scope: Scope, send: Send) -> None:
        number, first = await anext(events)
        if isinstance(first, Answer):
            self._note(scope, number, first)
            if first.error is not None:
                raise of_answer(first.error, place=self._pending.reply.places[0])

        async def all_events() -> AsyncIterator[NumberedEvent]:
            yield number, first
            async for event in events:
                if isinstance(event[1], Answer):
                    self._note(scope, event[0], event[1])
                yield event

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(STALLED_READER_S):
                await send(message)

        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **self._reply_headers}
        frames = self._pending.reply.frames(all_events())
        await EventSourceResponse(frames, headers=headers).stream_response(send_in_time)

    def _note(self, scope: Scope, number: int, answer: Answer) -> None:
        """Note an answer for the log. The answers to one prompt count its tokens once, as in their usage."""
        visit = visit_of(scope)
        if number % (len(self._pending.answering) // self._pending.reply.num_prompts) == 0:
            visit.prompt_tokens += answer.prompt_tokens
        visit.completion_tokens += len(answer.token_ids)
        visit.is_left = self._has_hung_up
        if answer.error is not None:
            visit.error = answer.error.code

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass  # the body is already read: only its last message can come
        self._has_hung_up = True
        self._pending.cancel()


async def merged(answering: Sequence[Answering]) -> AsyncGenerator[NumberedEvent]:
    """The events of all answers in the order in which they arrive, until every answer is complete."""
    events: asyncio.Queue[NumberedEvent | Exception] = asyncio.Queue()

    async def pass_on(number: int, one: Answering) -> None:
        try:
            async for event in one:
                events.put_nowait((number, event))
        except Exception as error:
            events.put_nowait(error)

    tasks = [asyncio.create_task(pass_on(number, one)) for number, one in enumerate(answering)]
    try:
        num_left = len(tasks)
        while num_left:
            came = await events.get()
            if isinstance(came, Exception):
                raise came
            num_left -= isinstance(came[1], Answer)
            yield came
    finally:
        for task in tasks:
            task.cancel()
