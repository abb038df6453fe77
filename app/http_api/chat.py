"""A chat request -> one question about one picture -> its answer, whole or as server-sent events."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from llama_adapter.app.captioning.captioner import ModelInfo
from llama_adapter.app.http_api import schemas
from llama_adapter.app.http_api.access import Visit, visit_of
from llama_adapter.app.http_api.errors import ApiError, of_answer, of_refusal
from llama_adapter.app.http_api.pictures import PictureSettings, read_picture
from llama_adapter.app.http_api.schemas import (
    AssistantMessage,
    ChatRequest,
    ImagePart,
    SystemMessage,
    TextPart,
    UserMessage,
)
from llama_adapter.app.online.request_handle import Ask, RequestHandle
from llama_adapter.app.online.service import Service
from llama_adapter.app.online.types import ServiceError
from llama_adapter.app.tasks.answers import Answer, Event, TextDelta
from llama_adapter.app.tasks.question import Question
from llama_adapter.app.tasks.registry import question_of
from llama_adapter.app.tasks.task import WithTokenIds
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.errors import LlamaAdapterError

IGNORED_TURNS = "x-ignored-turns"
ALIAS = "default"  # names the loaded model
STALLED_READER_S = 30.0  # a client that reads nothing for so long is disconnected
_INLINE_CHARS = 1000  # a prompt up to this length is tokenised in the event loop: a thread would take as long


async def submit_chat(
    request: ChatRequest, *, scope: Scope, service: Service, pictures: PictureSettings
) -> "ChatResponse":
    """Submit a chat request; raises ApiError."""
    info = model_info(service)
    check_model(request.model, info=info)
    chat = understand(request)
    ask = Ask(
        picture=await read_picture(chat.picture_url, settings=pictures),
        prompt=chat.question.prompt(info.default_prompt),
        sampling=chat.sampling,
        task=WithTokenIds(chat.question.task) if request.output_ids else chat.question.task,
        stop=chat.stop,
        client=str(scope.get("state", {}).get("client", "")),
    )
    handle = await _submit(ask, service=service)
    return ChatResponse(
        handle,
        head={
            "id": f"chatcmpl-{visit_of(scope).id.removeprefix('req_')}",
            "created": int(time.time()),
            "model": info.name,
            "system_fingerprint": f"fp_{info.digest[:12]}",
        },
        headers={IGNORED_TURNS: str(chat.num_ignored_turns)},
        is_stream=bool(request.stream),
        with_usage=request.stream_options is not None and bool(request.stream_options.include_usage),
    )


def model_info(service: Service) -> ModelInfo:
    """The loaded model; raises ApiError while there is none."""
    try:
        return service.info
    except ServiceError as error:
        raise of_refusal(error) from None


def check_model(name: str, *, info: ModelInfo) -> None:
    """Raise ApiError unless `name` is the loaded model's."""
    if name not in (info.name, ALIAS):
        message = f"Model not found. The loaded model is `{info.name}`, also named `{ALIAS}`."
        raise ApiError(message, status=404, code="model_not_found", param="model")


async def _submit(ask: Ask, *, service: Service) -> RequestHandle:
    texts = (ask.prompt if isinstance(ask.prompt, tuple) else (ask.prompt,)) + ask.task.continuations
    num_chars = sum(len(text) for text in texts if isinstance(text, str))
    try:
        if num_chars <= _INLINE_CHARS:
            return service.submit(ask)
        return await asyncio.to_thread(service.submit, ask)
    except (LlamaAdapterError, ValueError) as error:
        raise of_refusal(error) from None


class ChatResponse(Response):
    """Waits for the answer and sends it; a client that hangs up or stops reading cancels its request.

    The wait is here and not in the route, so that FastAPI has released the request's body by then. A stream starts
    with the first event: an error before it has its own status.
    """

    def __init__(
        self,
        handle: RequestHandle,
        *,
        head: dict[str, Any],
        headers: Mapping[str, str],
        is_stream: bool,
        with_usage: bool,
    ) -> None:
        super().__init__()
        self._handle, self._head, self._reply_headers = handle, head, headers
        self._is_stream, self._with_usage = is_stream, with_usage
        self._has_hung_up = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; raises ApiError, or TimeoutError if the client stops reading."""
        visit = visit_of(scope)
        listening = asyncio.create_task(self._listen(receive))
        try:
            events = aiter(self._handle) if self._is_stream else None
            first = await self._handle.answer() if events is None else await anext(events)
            if isinstance(first, Answer):
                _note(first, visit)
                visit.is_left = self._has_hung_up
                if visit.is_left:
                    return
                if first.error is not None:
                    raise of_answer(first.error)
            if events is None:
                assert isinstance(first, Answer)
                await JSONResponse(_completion(first, self._head), headers=self._reply_headers)(scope, receive, send)
            else:
                await self._stream(self._events(first, events, visit=visit), send)
        finally:
            listening.cancel()
            self._handle.cancel()  # no effect on an answered request

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass  # only the end of the body is left
        self._has_hung_up = True
        self._handle.cancel()

    async def _events(self, first: Event, events: AsyncIterator[Event], *, visit: Visit) -> AsyncIterator[Event]:
        yield first
        async for event in events:
            if isinstance(event, Answer):
                _note(event, visit)
                visit.is_left = self._has_hung_up
            yield event

    async def _stream(self, events: AsyncIterator[Event], send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(STALLED_READER_S):
                await send(message)

        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **self._reply_headers}
        frames = stream_frames(events, head=self._head, with_usage=self._with_usage)
        await EventSourceResponse(frames, headers=headers).stream_response(send_in_time)


async def stream_frames(
    events: AsyncIterator[Event], *, head: Mapping[str, Any], with_usage: bool
) -> AsyncIterator[bytes]:
    """Server-sent events of an answer: role, pieces of text, finish reason, token counts if wanted, and [DONE].

    An answer with an error ends the stream with the error's envelope instead.
    """

    def chunk(delta: Mapping[str, str], **fields: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        return frame([choice], **({"usage": None} if with_usage else {}))

    def frame(choices: list[dict[str, Any]], **fields: Any) -> bytes:
        content = {**head, "object": "chat.completion.chunk", "choices": choices, **fields}
        return format_sse_event(data_str=json.dumps(content))

    yield chunk({"role": "assistant", "content": ""})
    has_text = False
    async for event in events:
        if isinstance(event, TextDelta):
            has_text = True
            yield chunk({"content": event.text})
        elif event.error is not None:
            yield format_sse_event(data_str=json.dumps(of_answer(event.error).envelope()))
        else:
            if event.text and not has_text:  # a scored answer has no deltas
                yield chunk({"content": event.text})
            yield chunk({}, **_outcome(event))
            if with_usage:
                yield frame([], usage=_usage(event))
    yield format_sse_event(data_str="[DONE]")


def _completion(answer: Answer, head: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a whole answer: `schemas.ChatCompletion`."""
    message = {"role": "assistant", "content": answer.text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, **_outcome(answer)}
    return {**head, "object": "chat.completion", "choices": [choice], "usage": _usage(answer)}


def _outcome(answer: Answer) -> dict[str, Any]:
    """Why the answer ended, and the extensions that have a value: `schemas.Choice`."""
    extensions = {
        "answer_probabilities": answer.choice,
        "answer_details": dict(answer.details) or None,
        "unfamiliar": answer.unfamiliar,
    }
    return {
        "finish_reason": "length" if answer.finish == "length" else "stop",
        **{name: value for name, value in extensions.items() if value is not None},
    }


def _usage(answer: Answer) -> dict[str, int]:
    num_prompt, num_new = answer.prompt_tokens, len(answer.token_ids)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


def _note(answer: Answer, visit: Visit) -> None:
    visit.prompt_tokens, visit.completion_tokens = answer.prompt_tokens, len(answer.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatQuestion:
    """What a chat request asks."""

    picture_url: str
    question: Question
    sampling: SamplingParams
    stop: tuple[str, ...]
    num_ignored_turns: int  # earlier messages that the model does not see in full


def understand(request: ChatRequest) -> ChatQuestion:
    """The question of a request; raises ApiError if there is none, or more than one picture."""
    _check_together(request)
    *earlier, last = request.messages
    if not isinstance(last, UserMessage):
        raise _invalid("The last message must have the role user: its text is the question.", "messages")
    place, picture_url = _newest_picture(request.messages)
    try:
        question = question_of({**request.task_values(), **_prompt(request.messages)})
    except ValueError:
        raise ApiError("The extension fields do not make one task: see /docs.", code="invalid_value") from None
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    return ChatQuestion(
        picture_url=picture_url,
        question=question,
        sampling=_sampling(request),
        stop=() if question.task.continuations else stop,
        num_ignored_turns=sum(_is_ignored(message, has_picture=i == place) for i, message in enumerate(earlier)),
    )


def _check_together(request: ChatRequest) -> None:
    """Check parameters that constrain each other."""
    if request.stream_options is not None and not request.stream:
        raise _invalid("`stream_options` requires `stream`: true.", "stream_options")
    if len({request.max_tokens, request.max_completion_tokens} - {None}) > 1:
        raise _invalid("`max_tokens` and `max_completion_tokens` differ: leave one out.", "max_tokens")


def _newest_picture(messages: Sequence[schemas.Message]) -> tuple[int, str]:
    """Index of the newest message with a picture, and the picture's URL."""
    for place in reversed(range(len(messages))):
        urls = _picture_urls(messages[place])
        if len(urls) == 1:
            return place, urls[0]
        if urls:
            message = f"Message {place} has {len(urls)} pictures: a request is about one. Send a request for each."
            raise ApiError(message, code="too_many_images", param=f"messages[{place}].content")
    message = "The messages have no picture: send one as a part of type image_url."
    raise ApiError(message, code="missing_image", param="messages")


def _prompt(messages: Sequence[schemas.Message]) -> dict[str, str]:
    """System texts are the instruction and the user's text its input; without them, that is the instruction."""
    system = "\n".join(filter(str.strip, (_text(item) for item in messages if isinstance(item, SystemMessage))))
    asked = _text(messages[-1])
    texts = [text for text in (system, asked) if text.strip()]
    return dict(zip(("instruction", "input"), texts, strict=False))


def _sampling(request: ChatRequest) -> SamplingParams:
    given = {
        "max_new_tokens": request.max_completion_tokens or request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": request.seed,
    }
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def _is_ignored(message: schemas.Message, *, has_picture: bool) -> bool:
    """Whether the model does not see all of an earlier message; `has_picture`: it holds the question's picture."""
    if isinstance(message, SystemMessage):
        return False
    return bool(_text(message).strip()) or (bool(_picture_urls(message)) and not has_picture)


def _text(message: schemas.Message) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content or () if isinstance(part, TextPart))


def _picture_urls(message: schemas.Message) -> list[str]:
    if isinstance(message, AssistantMessage | SystemMessage) or isinstance(message.content, str):
        return []
    return [part.image_url.url for part in message.content if isinstance(part, ImagePart)]


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(message, code="invalid_value", param=param)
