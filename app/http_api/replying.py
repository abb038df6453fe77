"""Asks a service, and sends what it answers: whole, or as server-sent events. The form is a `Reply`'s."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from fastapi.sse import EventSourceResponse
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from llama_adapter.app.captioning.captioner import ModelInfo
from llama_adapter.app.http_api.access import visit_of
from llama_adapter.app.http_api.conversation import ChatQuestion
from llama_adapter.app.http_api.errors import ApiError, of_answer, of_refusal
from llama_adapter.app.http_api.pictures import PictureSettings, read_picture
from llama_adapter.app.http_api.structured import Property, combined
from llama_adapter.app.online.request_handle import Ask, RequestHandle
from llama_adapter.app.online.service import Service
from llama_adapter.app.online.types import ServiceError
from llama_adapter.app.tasks.answers import Answer, Event
from llama_adapter.runtime.errors import LlamaAdapterError

IGNORED_TURNS = "x-ignored-turns"
ALIAS = "default"  # names the loaded model
STALLED_READER_S = 30.0  # a client that reads nothing for so long is disconnected
_INLINE_CHARS = 1000  # a prompt up to this length is tokenised in the event loop: a thread would take as long

NumberedEvent = tuple[int, Event]  # which of the answers it belongs to


class Reply(Protocol):
    """How answers look on the wire."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of complete answers."""

    def frames(self, events: AsyncIterator[NumberedEvent]) -> AsyncIterator[bytes]:
        """The server-sent events of answers as they come; an answer with an error ends them."""


class Answering(Protocol):
    """One answer on its way: a request of the service, or several that make one answer."""

    def cancel(self) -> None: ...

    async def answer(self) -> Answer: ...

    def __aiter__(self) -> AsyncIterator[Event]: ...


class PartedAnswer:
    """The answer that several requests make, one for each property of its JSON."""

    def __init__(self, handles: Sequence[RequestHandle], properties: Sequence[Property]) -> None:
        self._handles, self._properties = handles, properties

    def cancel(self) -> None:
        """Cancel all of them."""
        for handle in self._handles:
            handle.cancel()

    async def answer(self) -> Answer:
        """The whole answer; after a failure the other requests are cancelled."""
        answers: list[Answer] = []
        for handle in self._handles:
            answers.append(await handle.answer())
            if answers[-1].error is not None:
                self.cancel()
                return answers[-1]
        return combined(self._properties, answers)

    async def __aiter__(self) -> AsyncIterator[Event]:
        """There are no pieces of text."""
        yield await self.answer()


def model_info(service: Service) -> ModelInfo:
    """The loaded model; raises ApiError while there is none."""
    try:
        return service.info
    except ServiceError as error:
        raise of_refusal(error) from None


def shown_name(name: str, *, info: ModelInfo, names: Sequence[str]) -> str:
    """The name that an answer shows; `names` are those that the server was given, if any.

    Raises ApiError unless `name` is one of the loaded model's.
    """
    names = names or (info.name,)
    if name not in (*names, ALIAS):
        message = (
            f"Model not found. The loaded model is `{names[0]}`: send this name or `{ALIAS}`, or start the server with "
            "`--served-model-name`."
        )
        raise ApiError(message, status=404, code="model_not_found", param="model")
    return names[0] if name == ALIAS else name


async def ask_all(
    asked: ChatQuestion, *, scope: Scope, service: Service, pictures: PictureSettings, default_prompt: str
) -> list[Answering]:
    """Submit the requests of a question, one answer for each of `num_answers`; raises ApiError."""
    picture = None if asked.picture_url is None else await read_picture(asked.picture_url, settings=pictures)
    handles: list[Answering] = []
    submitted: list[RequestHandle] = []
    try:
        for number in range(asked.num_answers):
            sampling = asked.sampling
            if sampling.seed is not None:
                sampling = dataclasses.replace(sampling, seed=sampling.seed + number)
            parts = []
            for question in asked.questions:
                ask = Ask(
                    picture=picture,
                    prompt=question.prompt(default_prompt),
                    sampling=sampling,
                    task=question.task,
                    stop=() if question.task.continuations else asked.stop,
                    client=str(scope.get("state", {}).get("client", "")),
                    with_logprobs=asked.with_logprobs,
                )
                parts.append(await _submit(ask, service=service))
                submitted.append(parts[-1])
            handles.append(PartedAnswer(parts, asked.properties) if asked.properties else parts[0])
    except BaseException:
        for handle in submitted:
            handle.cancel()
        raise
    return handles


async def _submit(ask: Ask, *, service: Service) -> RequestHandle:
    texts = (ask.prompt if isinstance(ask.prompt, tuple) else (ask.prompt,)) + ask.task.continuations
    num_chars = sum(len(text) for text in texts if isinstance(text, str))
    try:
        if num_chars <= _INLINE_CHARS:
            return service.submit(ask)
        return await asyncio.to_thread(service.submit, ask)
    except (LlamaAdapterError, ValueError) as error:
        raise of_refusal(error) from None


def head_of(asked: ChatQuestion, *, prefix: str, name: str, scope: Scope) -> dict[str, Any]:
    """Fields that answers of every form have; `prefix` is that of their id."""
    used = {} if asked.picture_used is None else {"picture_used": asked.picture_used}
    return {"id": f"{prefix}{visit_of(scope).id.removeprefix('req_')}", "model": name, **used}


class AnswerResponse(Response):
    """Waits for the answers and sends them; a client that hangs up or stops reading cancels its requests.

    The wait is here and not in the route, so that FastAPI has released the request's body by then. A stream starts
    with the first event: an error before it has its own status.
    """

    def __init__(
        self, answering: Sequence[Answering], *, reply: Reply, num_ignored_turns: int, is_stream: bool
    ) -> None:
        super().__init__()
        self._answering, self._reply, self._is_stream = answering, reply, is_stream
        self._reply_headers = {IGNORED_TURNS: str(num_ignored_turns)}
        self._has_hung_up = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; raises ApiError, or TimeoutError if the client stops reading."""
        listening = asyncio.create_task(self._listen(receive))
        try:
            if self._is_stream:
                async with aclosing(merged(self._answering)) as events:
                    await self._send_stream(events, scope, send)
            else:
                await self._send_whole(scope, receive, send)
        finally:
            listening.cancel()
            self._cancel()  # no effect on answered requests

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers: list[Answer] = []
        for one in self._answering:
            answers.append(await one.answer())
            if self._is_over(answers[-1], scope):
                return
        await JSONResponse(self._reply.whole(answers), headers=self._reply_headers)(scope, receive, send)

    async def _send_stream(self, events: AsyncIterator[NumberedEvent], scope: Scope, send: Send) -> None:
        number, first = await anext(events)
        if isinstance(first, Answer) and self._is_over(first, scope):
            return

        async def all_events() -> AsyncIterator[NumberedEvent]:
            yield number, first
            async for event in events:
                if isinstance(event[1], Answer):
                    self._note(event[1], scope)
                yield event

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(STALLED_READER_S):
                await send(message)

        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **self._reply_headers}
        frames = self._reply.frames(all_events())
        await EventSourceResponse(frames, headers=headers).stream_response(send_in_time)

    def _is_over(self, answer: Answer, scope: Scope) -> bool:
        """Whether the client has left, with the answer noted; raises ApiError for an answer with an error."""
        self._note(answer, scope)
        if self._has_hung_up:
            return True
        if answer.error is not None:
            raise of_answer(answer.error)
        return False

    def _note(self, answer: Answer, scope: Scope) -> None:
        visit = visit_of(scope)
        visit.prompt_tokens = answer.prompt_tokens
        visit.completion_tokens += len(answer.token_ids)
        visit.is_left = self._has_hung_up

    def _cancel(self) -> None:
        for one in self._answering:
            one.cancel()

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass  # only the end of the body is left
        self._has_hung_up = True
        self._cancel()


async def merged(answering: Sequence[Answering]) -> AsyncGenerator[NumberedEvent]:
    """The events of all answers as they come, up to the last answer."""
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
