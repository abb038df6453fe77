"""Answers as server-sent events, in the form and order that OpenAI's clients expect; makes no request of its own."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llama_adapter.app.http_api.problems import of_answer
from llama_adapter.app.http_api.replies import Usage
from llama_adapter.app.online.request_handle import RequestHandle
from llama_adapter.app.tasks.answers import Answer, Event, TextDelta

STALLED_READER_S = 30.0  # a client that takes nothing for so long is given up
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What all pieces of one answer have in common."""

    id: str
    created: int  # seconds since 1970
    model: str
    fingerprint: str


def usage_of(answer: Answer) -> Usage:
    """The token counts of an answer."""
    num_prompt, num_new = answer.prompt_tokens, len(answer.token_ids)
    return Usage(prompt_tokens=num_prompt, completion_tokens=num_new, total_tokens=num_prompt + num_new)


async def frames(events: AsyncIterator[Event], *, head: Head, with_usage: bool) -> AsyncIterator[bytes]:
    """The stream of an answer: the role, pieces of text, why it ended, the counts if they are wanted, and the end.

    An answer with an error ends the stream with the error's envelope instead.
    """
    yield _chunk(head, {"role": "assistant", "content": ""}, with_usage=with_usage)
    has_text = False
    async for event in events:
        if isinstance(event, TextDelta):
            has_text = True
            yield _chunk(head, {"content": event.text}, with_usage=with_usage)
        elif event.error is not None:
            yield b"data: " + of_answer(event.error).body() + b"\n\n"
            yield _DONE
        else:
            if event.text and not has_text:  # a scored answer comes whole
                yield _chunk(head, {"content": event.text}, with_usage=with_usage)
            yield _chunk(head, {}, with_usage=with_usage, answer=event)
            if with_usage:
                yield _frame(head, [], {"usage": usage_of(event).model_dump()})
            yield _DONE


def finish_reason(answer: Answer) -> Literal["stop", "length"]:
    """Why an answer ended, in OpenAI's words."""
    return "length" if answer.finish == "length" else "stop"


def extensions_of(answer: Answer) -> dict[str, Any]:
    """What the choice of a whole or streamed answer has beside OpenAI's fields; `replies.Choice` describes it."""
    said = {"answer_probabilities": answer.choice, "unfamiliar": answer.unfamiliar}
    return {name: value for name, value in said.items() if value is not None}


def _chunk(head: Head, delta: Mapping[str, str], *, with_usage: bool, answer: Answer | None = None) -> bytes:
    choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    if answer is not None:
        choice["finish_reason"] = finish_reason(answer)
        choice |= extensions_of(answer)
    return _frame(head, [choice], {"usage": None} if with_usage else {})


def _frame(head: Head, choices: list[dict[str, Any]], more: Mapping[str, Any]) -> bytes:
    content = {
        "id": head.id,
        "object": "chat.completion.chunk",
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
        "choices": choices,
        **more,
    }
    return b"data: " + json.dumps(content).encode() + b"\n\n"


class EventStream(Response):
    """Sends frames as they come. A client that takes none for long is left; `on_end` is called however it ends."""

    media_type = "text/event-stream"

    def __init__(
        self, content: AsyncIterator[bytes], *, headers: Mapping[str, str], on_end: Callable[[], None]
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._frames, self._on_end = content, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; raises TimeoutError when the client takes nothing any more."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for frame in self._frames:
                await _send_body(frame, send, is_last=False)
            await _send_body(b"", send, is_last=True)
        finally:
            self._on_end()


async def _send_body(body: bytes, send: Send, *, is_last: bool) -> None:
    async with asyncio.timeout(STALLED_READER_S):
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})


class HangUp:
    """Cancels a request when its client goes away."""

    def __init__(self, handle: RequestHandle, *, receive: Receive) -> None:
        self.is_noticed = False
        self._handle = handle
        self._listening = asyncio.create_task(self._listen(receive))

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass  # of a body that was read there is nothing left but its end
        self.is_noticed = True
        self._handle.cancel()

    def close(self) -> None:
        """Listen no longer; what is not answered by now is cancelled. Harmless when repeated."""
        self._listening.cancel()
        self._handle.cancel()
