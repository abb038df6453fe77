"""OpenAI's legacy completions: continues texts without a template, and makes completions and their chunks."""

import itertools
from collections.abc import Sequence
from typing import Any

from llama_adapter.app.captioning.captioner import ModelInfo
from llama_adapter.app.captioning.tasks.answers import TokenLogprob
from llama_adapter.app.captioning.tasks.choose import choosing
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.captioning.tasks.task import WithTokenIds
from llama_adapter.app.serving.http_api.chat import ChoicesReply, check_stream_options
from llama_adapter.app.serving.http_api.conversation import ChatQuestion, form_of, sampling_of, stop_of
from llama_adapter.app.serving.http_api.errors import ApiError
from llama_adapter.app.serving.http_api.schemas import MAX_QUESTIONS, CompletionRequest

DEFAULT_TOKENS = 16  # of an answer, as at OpenAI's


class CompletionReply(ChoicesReply[CompletionRequest]):
    """Answers as completions: `schemas.Completion`. A chunk is a completion too."""

    path = "/v1/completions"
    base_request = CompletionRequest
    id_prefix = "cmpl-"
    places = ("image_url", "prompt")
    name = chunk_name = "text_completion"

    @staticmethod
    def understand(request: CompletionRequest, info: ModelInfo) -> ChatQuestion:
        check_stream_options(request)
        prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        num_answers = request.n or 1
        if len(prompts) * num_answers > MAX_QUESTIONS:
            message = f"`n` times the number of prompts is {len(prompts) * num_answers}, the limit is {MAX_QUESTIONS}."
            raise ApiError(message, param="prompt")
        task = choosing(getattr(request.structured_outputs, "choice", None))
        task = WithTokenIds(task) if request.output_ids else task
        return ChatQuestion(
            urls=() if request.image_url is None else (request.image_url,),
            text_prefix=request.text_prefix,
            prompts=tuple((Question(raw=prompt, task=task),) for prompt in prompts),
            sampling=sampling_of(request, max_new_tokens=request.max_tokens or DEFAULT_TOKENS, form=form_of(request)),
            stop=stop_of(request),
            num_logprobs=request.logprobs,
            num_answers=num_answers,
        )

    def content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    piece = content

    def ends(self, rest: str) -> list[dict[str, Any]]:
        return [self.piece(rest)]

    def logprobs(self, tokens: Sequence[TokenLogprob], *, after: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
        """The generated tokens: `schemas.CompletionLogprobs`."""
        lengths = (len(one.text) for one in tokens)
        return {
            "tokens": [one.text for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            # The first of two tokens with the same text is the likelier one.
            "top_logprobs": [{**dict(reversed(one.top)), one.text: one.logprob} for one in tokens],
            "text_offset": [*itertools.accumulate(lengths, initial=sum(len(one.text) for one in after))][:-1],
        }
