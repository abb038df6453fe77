"""OpenAI's responses: turns a responses request into a question, and the answer into a response or its events."""

import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi.sse import format_sse_event

from llama_adapter.app.captioning.captioner import ModelInfo
from llama_adapter.app.captioning.tasks.answers import Answer, TextDelta
from llama_adapter.app.serving.http_api.asking import NumberedEvent, Reply
from llama_adapter.app.serving.http_api.chat import extensions_of, logprobs_of
from llama_adapter.app.serving.http_api.conversation import ChatQuestion, Turn, form_of, turn_of, understand_turns
from llama_adapter.app.serving.http_api.errors import ApiError, of_answer
from llama_adapter.app.serving.http_api.schemas import NO_LIMIT, ResponsesRequest

_LOGPROBS = "message.output_text.logprobs"


def _parameters_of(request: ResponsesRequest, question: ChatQuestion) -> dict[str, Any]:
    """The request's parameters that the response repeats, with defaults filled in: fields of `schemas.ResponseBody`."""
    wanted = None if request.text is None else request.text.format
    return {
        "instructions": request.instructions,
        "max_output_tokens": None if request.max_output_tokens == NO_LIMIT else request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": question.sampling.temperature,
        "text": {"format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True)},
        "tool_choice": request.tool_choice or "auto",
        "tools": [],
        "top_p": question.sampling.top_p,
        "truncation": "disabled",
    }


class ResponsesReply(Reply[ResponsesRequest]):
    """An answer as a response, which has the request's parameters."""

    path = "/v1/responses"
    base_request = ResponsesRequest
    id_prefix = "resp_"
    places = ("input", "input")

    def __init__(
        self, request: ResponsesRequest, asked: ChatQuestion, head: Mapping[str, Any], info: ModelInfo
    ) -> None:
        self._head = {**head, "created_at": int(time.time()), **_parameters_of(request, asked)}
        self._with_logprobs = asked.num_logprobs is not None
        self._item_id = f"msg_{str(head['id']).removeprefix('resp_')}"

    @staticmethod
    def understand(request: ResponsesRequest, info: ModelInfo) -> ChatQuestion:
        with_logprobs = _LOGPROBS in (request.include or ())
        if request.top_logprobs and not with_logprobs:
            raise ApiError(f'`top_logprobs` requires `include`: ["{_LOGPROBS}"].', param="top_logprobs")
        turns = [Turn(role="system", parts=(request.instructions or "",))]
        if isinstance(request.input, str):
            turns.append(Turn(role="user", parts=(request.input,)))
        else:
            turns += [turn_of(item, place=f"input[{index}]") for index, item in enumerate(request.input)]
        return understand_turns(
            turns,
            request,
            info,
            place="input",
            max_new_tokens=request.max_output_tokens,
            form=form_of(request, None if request.text is None else request.text.format),
            num_logprobs=(request.top_logprobs or 0) if with_logprobs else None,
        )

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body: `schemas.ResponseBody`."""
        (answer,) = answers
        is_cut = answer.finish == "length"
        status = "incomplete" if is_cut else "completed"
        num_prompt, num_new = answer.prompt_tokens, len(answer.token_ids)
        return self._response(
            status,
            output=[self._message(status, content=[self._part(answer.text, answer)])],
            completed_at=None if is_cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            usage={
                "input_tokens": num_prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": num_new,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": num_prompt + num_new,
            },
            **extensions_of(answer),
        )

    async def frames(self, events: AsyncIterator[NumberedEvent]) -> AsyncIterator[bytes]:
        """Events in OpenAI's order: the response, its message, the message's part, the pieces of the part's text, then
        the end of the text, part, message and response. If the answer failed, `error` and `response.failed` end the
        stream.
        """
        numbers = itertools.count()

        def numbered(kind: str, /, **fields: Any) -> bytes:
            content = {**fields, "type": kind, "sequence_number": next(numbers)}
            return format_sse_event(data_str=json.dumps(content), event=kind)

        begun = self._response("in_progress")
        yield numbered("response.created", response=begun)
        yield numbered("response.in_progress", response=begun)
        item = {"output_index": 0}
        part = {**item, "item_id": self._item_id, "content_index": 0}
        yield numbered("response.output_item.added", **item, item=self._message("in_progress", content=[]))
        yield numbered("response.content_part.added", **part, part=self._part(""))
        has_text = False
        async for _, event in events:
            if isinstance(event, TextDelta):
                has_text = True
                yield numbered(
                    "response.output_text.delta", **part, delta=event.text, logprobs=logprobs_of(event.logprobs)
                )
            elif event.error is not None:
                error = of_answer(event.error, place=self.places[0]).envelope()["error"]
                yield numbered("error", **error, error=error)
                failure = {"code": error["code"], "message": error["message"]}
                yield numbered("response.failed", response=self._response("failed", error=failure))
            else:
                if event.text and not has_text:  # a scored answer has no deltas
                    yield numbered("response.output_text.delta", **part, delta=event.text, logprobs=[])
                whole = self.whole([event])
                (message,) = whole["output"]
                (text_part,) = message["content"]
                logprobs = text_part["logprobs"]
                yield numbered("response.output_text.done", **part, text=event.text, logprobs=logprobs)
                yield numbered("response.content_part.done", **part, part=text_part)
                yield numbered("response.output_item.done", **item, item=message)
                yield numbered(f"response.{whole['status']}", response=whole)

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        empty = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
        return {**self._head, "object": "response", "status": status, "output": [], **empty, **fields}

    def _message(self, status: str, *, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, text: str, answer: Answer | None = None) -> dict[str, Any]:
        logprobs = logprobs_of(answer.logprobs) if answer is not None and self._with_logprobs else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
