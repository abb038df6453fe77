"""POST /v1/chat/completions, from the request's body to its answer, whole or as a stream."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from llama_adapter.app.captioning.captioner import ModelInfo
from llama_adapter.app.http_api.access import Visit, visit_of
from llama_adapter.app.http_api.conversation import understand
from llama_adapter.app.http_api.parsing import parse_chat_request
from llama_adapter.app.http_api.pictures import PictureRefusedError, PictureSettings, read_picture
from llama_adapter.app.http_api.problems import CLIENT_GONE, ApiError, of_answer, of_refusal
from llama_adapter.app.http_api.replies import AnswerMessage, ChatCompletion, Choice
from llama_adapter.app.http_api.streaming import (
    EventStream,
    HangUp,
    Head,
    extensions_of,
    finish_reason,
    frames,
    usage_of,
)
from llama_adapter.app.online.request_handle import Ask, RequestHandle
from llama_adapter.app.online.service import Service
from llama_adapter.app.online.types import ServiceError
from llama_adapter.app.tasks.answers import Answer, Event
from llama_adapter.runtime.errors import LlamaAdapterError

IGNORED_TURNS = "x-ignored-turns"
ALIAS = "default"  # names whatever model is loaded
_INLINE_CHARS = 1000  # of a prompt that is tokenised at once: a thread would take as long


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request that was read and understood."""

    ask: Ask
    num_ignored_turns: int
    is_stream: bool
    with_usage: bool


async def complete_chat(request: Request, *, service: Service, pictures: PictureSettings) -> Response:
    """Answer a chat request; raises ApiError."""
    visit = visit_of(request.scope)
    info = model_info(service)
    asked = await _read(request, info=info, pictures=pictures)
    handle = await _submit(asked.ask, service=service)
    head = Head(
        id=f"chatcmpl-{visit.id.removeprefix('req_')}",
        created=int(time.time()),
        model=info.name,
        fingerprint=f"fp_{info.digest[:12]}",
    )
    headers = {IGNORED_TURNS: str(asked.num_ignored_turns)}
    hang_up = HangUp(handle, receive=request.receive)
    try:
        if asked.is_stream:
            return await _stream(
                handle, hang_up=hang_up, head=head, headers=headers, visit=visit, with_usage=asked.with_usage
            )
        return await _whole(handle, hang_up=hang_up, head=head, headers=headers, visit=visit)
    except BaseException:
        hang_up.close()
        raise


def model_info(service: Service) -> ModelInfo:
    """The loaded model; raises ApiError while there is none."""
    try:
        return service.info
    except ServiceError as error:
        raise of_refusal(error) from None


def check_model(name: str, *, info: ModelInfo) -> None:
    """Raise ApiError unless the loaded model is meant."""
    if name not in (info.name, ALIAS):
        raise ApiError(
            f"There is no model of this name here: `{info.name}` is loaded, and `{ALIAS}` means it.",
            status=404,
            code="model_not_found",
            param="model",
        )


async def _read(request: Request, *, info: ModelInfo, pictures: PictureSettings) -> Asked:
    """The body with its picture decoded. What it was decoded from is given up with this call, before any waiting."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
    chat = await parse_chat_request(body)
    del body
    check_model(chat.model, info=info)
    question = understand(chat)
    try:
        picture = await read_picture(question.picture_url, settings=pictures)
    except PictureRefusedError as error:
        raise of_refusal(error) from None
    ask = Ask(
        picture=picture,
        prompt=info.default_prompt if question.prompt is None else question.prompt,
        sampling=question.sampling,
        choices=question.choices,
        stop=question.stop,
        client=str(request.scope.get("state", {}).get("client", "")),
    )
    return Asked(
        ask=ask,
        num_ignored_turns=question.num_ignored_turns,
        is_stream=bool(chat.stream),
        with_usage=chat.stream_options is not None and bool(chat.stream_options.include_usage),
    )


async def _submit(ask: Ask, *, service: Service) -> RequestHandle:
    texts = (ask.prompt if isinstance(ask.prompt, tuple) else (ask.prompt,)) + ask.task.continuations
    num_chars = sum(len(text) for text in texts if isinstance(text, str))
    try:
        if num_chars <= _INLINE_CHARS:
            return service.submit(ask)
        return await asyncio.to_thread(service.submit, ask)
    except (ServiceError, LlamaAdapterError, ValueError) as error:
        raise of_refusal(error) from None


async def _whole(
    handle: RequestHandle, *, hang_up: HangUp, head: Head, headers: dict[str, str], visit: Visit
) -> Response:
    answer = await handle.answer()
    hang_up.close()
    _note(answer, visit)
    if hang_up.is_noticed:
        return _nobody(visit)
    if answer.error is not None:
        raise of_answer(answer.error)
    extensions = extensions_of(answer)
    choice = Choice(message=AnswerMessage(content=answer.text), finish_reason=finish_reason(answer), **extensions)
    reply = ChatCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=[choice],
        usage=usage_of(answer),
        system_fingerprint=head.fingerprint,
    )
    left_out = {"answer_probabilities", "unfamiliar"} - extensions.keys()
    content = reply.model_dump_json(exclude={"choices": {0: left_out}} if left_out else None)
    return Response(content, media_type="application/json", headers=headers)


async def _stream(
    handle: RequestHandle, *, hang_up: HangUp, head: Head, headers: dict[str, str], visit: Visit, with_usage: bool
) -> Response:
    """A stream, begun only when there is something to send: what fails before has its own status."""
    events = aiter(handle)
    first = await anext(events)
    if isinstance(first, Answer):
        _note(first, visit)
        if hang_up.is_noticed:
            hang_up.close()
            return _nobody(visit)
        if first.error is not None:
            raise of_answer(first.error)

    async def all_events() -> AsyncIterator[Event]:
        yield first
        async for event in events:
            if isinstance(event, Answer):
                _note(event, visit)
                visit.is_left = hang_up.is_noticed
            yield event

    return EventStream(frames(all_events(), head=head, with_usage=with_usage), headers=headers, on_end=hang_up.close)


def _note(answer: Answer, visit: Visit) -> None:
    visit.prompt_tokens, visit.completion_tokens = answer.prompt_tokens, len(answer.token_ids)


def _nobody(visit: Visit) -> Response:
    """For a client that has hung up: nothing of it is sent any more."""
    visit.is_left = True
    return Response(status_code=CLIENT_GONE)
