"""OpenAI's chat completions: turns a chat request into a question, and answers into completions and chunks."""

import json
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from fastapi.sse import format_sse_event

from llama_adapter.app.captioning.captioner import ModelInfo
from llama_adapter.app.captioning.tasks.answers import Answer, TextDelta, TokenLogprob
from llama_adapter.app.serving.http_api.asking import NumberedEvent, Reply
from llama_adapter.app.serving.http_api.conversation import ChatQuestion, form_of, turn_of, understand_turns
from llama_adapter.app.serving.http_api.errors import ApiError, of_answer
from llama_adapter.app.serving.http_api.schemas import ChatRequest, CompletionRequest

Completing = TypeVar("Completing", bound=ChatRequest | CompletionRequest)


def check_stream_options(request: ChatRequest | CompletionRequest) -> None:
    """Raise ApiError for options of a stream without a stream."""
    if request.stream_options is not None and not request.stream:
        raise ApiError("`stream_options` requires `stream`: true.", param="stream_options")


class ChoicesReply(Reply[Completing]):
    """Answers as the choices of a completion: those of the first prompt, then those of the next one."""

    name: ClassVar[str]
    chunk_name: ClassVar[str]
    starts: ClassVar[Sequence[Mapping[str, Any]]] = ()  # chunks before the text

    def __init__(self, request: Completing, asked: ChatQuestion, head: Mapping[str, Any], info: ModelInfo) -> None:
        self._head = {**head, "created": int(time.time()), "system_fingerprint": f"fp_{info.digest[:12]}"}
        self.num_prompts, self._with_logprobs = len(asked.prompts), asked.num_logprobs is not None
        self._num_answers = asked.num_answers * self.num_prompts
        self._with_usage = request.stream_options is not None and bool(request.stream_options.include_usage)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of complete answers."""
        choices = [
            {"index": index, **self.content(answer.text), **self._outcome(answer)}
            for index, answer in enumerate(answers)
        ]
        return {**self._head, "object": self.name, "choices": choices, "usage": self._usage(answers)}

    async def frames(self, events: AsyncIterator[NumberedEvent]) -> AsyncIterator[bytes]:
        """Chunks with roles, pieces of text, finish reasons, and token counts if requested; then [DONE].

        An answer with an error ends the stream with the error's envelope instead.
        """
        for start in self.starts:
            for index in range(self._num_answers):
                yield self._chunk(index, start)
        answers: list[Answer] = []
        with_text: set[int] = set()
        sent: dict[int, list[TokenLogprob]] = defaultdict(list)
        async for index, event in events:
            if isinstance(event, TextDelta):
                with_text.add(index)
                logprobs = self.logprobs(event.logprobs, after=sent[index]) if event.logprobs else None
                sent[index] += event.logprobs
                yield self._chunk(index, {**self.piece(event.text), "logprobs": logprobs})
            elif event.error is not None:
                yield format_sse_event(data_str=json.dumps(of_answer(event.error, place=self.places[0]).envelope()))
                break
            else:
                answers.append(event)
                *pieces, last = self.ends("" if index in with_text else event.text)  # a scored answer has no deltas
                for piece in pieces:
                    yield self._chunk(index, piece)
                yield self._chunk(index, {**last, **self._outcome(event, sent=sent[index])})
                if self._with_usage and len(answers) == self._num_answers:
                    yield self._frame([], usage=self._usage(answers))
        yield format_sse_event(data_str="[DONE]")

    @abstractmethod
    def content(self, text: str) -> dict[str, Any]:
        """The text of a whole answer, as fields of its choice."""

    @abstractmethod
    def piece(self, text: str) -> dict[str, Any]:
        """A piece of text, as fields of a chunk's choice."""

    @abstractmethod
    def ends(self, rest: str) -> list[dict[str, Any]]:
        """The last chunks of an answer, with the `rest` of its text."""

    @abstractmethod
    def logprobs(self, tokens: Sequence[TokenLogprob], *, after: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
        """The log-probabilities of tokens, which come after other ones."""

    def _chunk(self, index: int, fields: Mapping[str, Any]) -> bytes:
        return self._frame([{"index": index, "logprobs": None, "finish_reason": None, **fields}])

    def _frame(self, choices: list[dict[str, Any]], **fields: Any) -> bytes:
        usage = {"usage": None} if self._with_usage else {}
        content = {**self._head, "object": self.chunk_name, **usage, "choices": choices, **fields}
        return format_sse_event(data_str=json.dumps(content))

    def _usage(self, answers: Sequence[Answer]) -> dict[str, int]:
        """The tokens of all prompts and answers: `schemas.Usage`. Each prompt has equally many answers."""
        num_prompt = sum(answer.prompt_tokens for answer in answers) * self.num_prompts // len(answers)
        num_new = sum(len(answer.token_ids) for answer in answers)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}

    def _outcome(self, answer: Answer, *, sent: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
        """Why the answer ended, its log-probabilities that were not sent, and extensions: fields of a choice."""
        rest = answer.logprobs[len(sent) :]
        is_scored = bool(answer.token_ids) and not answer.logprobs
        has_logprobs = self._with_logprobs and not is_scored and (bool(rest) or not sent)
        return {
            "finish_reason": "length" if answer.finish == "length" else "stop",
            "logprobs": self.logprobs(rest, after=sent) if has_logprobs else None,
            **extensions_of(answer),
        }


class ChatReply(ChoicesReply[ChatRequest]):
    """Answers as chat completions: `schemas.ChatCompletion`."""

    path = "/v1/chat/completions"
    base_request = ChatRequest
    id_prefix = "chatcmpl-"
    places = ("messages", "messages")
    name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    starts = ({"delta": {"role": "assistant", "content": ""}},)

    @staticmethod
    def understand(request: ChatRequest, info: ModelInfo) -> ChatQuestion:
        check_stream_options(request)
        if request.top_logprobs and not request.logprobs:
            raise ApiError("`top_logprobs` requires `logprobs`: true.", param="top_logprobs")
        if len({request.max_tokens, request.max_completion_tokens} - {None}) > 1:
            raise ApiError("`max_tokens` and `max_completion_tokens` differ: leave one out.", param="max_tokens")
        return understand_turns(
            [turn_of(message, place=f"messages[{index}]") for index, message in enumerate(request.messages)],
            request,
            info,
            place="messages",
            max_new_tokens=request.max_completion_tokens or request.max_tokens,
            form=form_of(request),
            num_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            num_answers=request.n or 1,
        )

    def content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def ends(self, rest: str) -> list[dict[str, Any]]:
        return [*([self.piece(rest)] if rest else []), {"delta": {}}]

    def logprobs(self, tokens: Sequence[TokenLogprob], *, after: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
        return {"content": logprobs_of(tokens), "refusal": None}


def logprobs_of(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """The generated tokens: `schemas.TokenLogprob`."""
    return [{**_token(one.text, one.logprob), "top_logprobs": [_token(*other) for other in one.top]} for one in tokens]


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "bytes": list(text.encode()), "logprob": logprob}


def extensions_of(answer: Answer) -> dict[str, Any]:
    """The extensions that have a value: `schemas.Extensions`."""
    extensions = {
        "answer_probabilities": answer.choice,
        "answer_details": dict(answer.details) or None,
        "unfamiliar": answer.unfamiliar,
    }
    return {name: value for name, value in extensions.items() if value is not None}
