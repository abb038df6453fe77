"""OpenAI's legacy completions: continues texts without a template, and makes completions and their chunks."""

import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi.sse import format_sse_event

from llama_adapter.app.captioning.captioner import ModelInfo
from llama_adapter.app.http_api.asking import Form, NumberedEvent
from llama_adapter.app.http_api.chat import check_stream_options, extensions_of, usage_of
from llama_adapter.app.http_api.conversation import ChatQuestion, sampling_of, stop_of
from llama_adapter.app.http_api.errors import ApiError, of_answer
from llama_adapter.app.http_api.schemas import MAX_QUESTIONS, CompletionRequest
from llama_adapter.app.tasks.answers import Answer, TextDelta
from llama_adapter.app.tasks.question import Question
from llama_adapter.app.tasks.task import FREE_TEXT, WithTokenIds

DEFAULT_TOKENS = 16  # of an answer, as at OpenAI's


def understand(request: CompletionRequest) -> ChatQuestion:
    """The prompts of a request; raises ApiError if there are too many answers."""
    check_stream_options(request)
    prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    num_answers = request.n or 1
    if len(prompts) * num_answers > MAX_QUESTIONS:
        message = f"`n` times the number of prompts is {len(prompts) * num_answers}, the limit is {MAX_QUESTIONS}."
        raise ApiError(message, code="invalid_value", param="prompt")
    task = WithTokenIds(FREE_TEXT) if request.output_ids else FREE_TEXT
    first, *others = (Question(raw=prompt, task=task) for prompt in prompts)
    return ChatQuestion(
        picture_url=request.image_url,
        picture_used=None,
        text_prefix=request.text_prefix,
        question=first,
        others=tuple(others),
        properties=(),
        sampling=sampling_of(request, max_new_tokens=request.max_tokens or DEFAULT_TOKENS),
        stop=stop_of(request),
        with_logprobs=request.logprobs is not None,
        num_top_logprobs=request.logprobs or 0,
        num_answers=num_answers,
        num_ignored_turns=0,
    )


def completions_form() -> Form[CompletionRequest]:
    """`/v1/completions`."""
    places = ("image_url", "prompt")
    return Form(request=CompletionRequest, id_prefix="cmpl-", understand=understand, reply=_reply, places=places)


def _reply(
    request: CompletionRequest, asked: ChatQuestion, head: Mapping[str, Any], info: ModelInfo
) -> "CompletionReply":
    fingerprint = f"fp_{info.digest[:12]}"
    common = {"object": "text_completion", "created": int(time.time()), "system_fingerprint": fingerprint}
    return CompletionReply(
        {**head, **common},
        with_usage=request.stream_options is not None and bool(request.stream_options.include_usage),
        with_logprobs=asked.with_logprobs,
        num_answers=asked.num_answers,
        num_prompts=1 + len(asked.others),
    )


class CompletionReply:
    """Answers as completions: `num_answers` of the first prompt, then of the next one. `head` is in every chunk too."""

    def __init__(
        self,
        head: Mapping[str, Any],
        *,
        with_usage: bool = False,
        with_logprobs: bool = False,
        num_answers: int = 1,
        num_prompts: int = 1,
    ) -> None:
        self._head, self._num_answers, self._num_prompts = head, num_answers, num_prompts
        self._with_usage, self._with_logprobs = with_usage, with_logprobs

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body: `schemas.Completion`."""
        choices = [self._choice(index, answer.text, answer) for index, answer in enumerate(answers)]
        return {**self._head, "choices": choices, "usage": usage_of(answers, num_prompts=self._num_prompts)}

    async def frames(self, events: AsyncIterator[NumberedEvent]) -> AsyncIterator[bytes]:
        """Chunks with pieces of text, finish reasons, and token counts if requested; then [DONE].

        An answer with an error ends the stream with the error's envelope instead.
        """
        answers: list[Answer] = []
        with_text: set[int] = set()
        async for index, event in events:
            if isinstance(event, TextDelta):
                with_text.add(index)
                yield self._frame([self._choice(index, event.text)])
            elif event.error is not None:
                yield format_sse_event(data_str=json.dumps(of_answer(event.error, place="image_url").envelope()))
                break
            else:
                answers.append(event)
                yield self._frame([self._choice(index, "" if index in with_text else event.text, event)])
                if self._with_usage and len(answers) == self._num_answers * self._num_prompts:
                    yield self._frame([], usage=usage_of(answers, num_prompts=self._num_prompts))
        yield format_sse_event(data_str="[DONE]")

    def _frame(self, choices: list[dict[str, Any]], **fields: Any) -> bytes:
        usage = {"usage": None} if self._with_usage else {}
        return format_sse_event(data_str=json.dumps({**self._head, **usage, "choices": choices, **fields}))

    def _choice(self, index: int, text: str, answer: Answer | None = None) -> dict[str, Any]:
        """`schemas.CompletionChoice`. Without the complete `answer`, it is a piece of one."""
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        if answer is None:
            return choice
        return {
            **choice,
            "logprobs": logprobs_of(answer) if self._with_logprobs else None,
            "finish_reason": "length" if answer.finish == "length" else "stop",
            **extensions_of(answer),
        }


def logprobs_of(answer: Answer) -> dict[str, Any]:
    """The generated tokens: `schemas.CompletionLogprobs`."""
    texts = [one.text for one in answer.logprobs]
    return {
        "tokens": texts,
        "token_logprobs": [one.logprob for one in answer.logprobs],
        # The first of two tokens with the same text is the likelier one.
        "top_logprobs": [dict(reversed(one.top)) for one in answer.logprobs],
        "text_offset": [0, *itertools.accumulate(map(len, texts))][: len(texts)],
    }
