"""Errors that a service answers itself, and checks of a request that need no model."""

from typing import Final

from llama_adapter.app.captioning.tasks.prompts import prompt_length
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.serving.online.request_handle import Ask
from llama_adapter.app.serving.online.types import ServiceLimits
from llama_adapter.llm.errors import PromptError

REPLICA_LOST: Final = "replica_lost"  # code of an error
CANCELLED: Final = AnswerError(code="cancelled", message="The request was cancelled.")


def late(allowed_s: float) -> AnswerError:
    """The error for a request that has no complete answer after `allowed_s` seconds."""
    return AnswerError(
        code="deadline", message=f"There was no complete answer within {allowed_s:g} s; ask again later."
    )


def check_sizes(ask: Ask, limits: ServiceLimits) -> None:
    """Raise PromptError for long texts, before they are tokenised."""
    limit = limits.max_prompt_chars
    if (length := prompt_length(ask.prompt)) > limit:
        raise PromptError(f"The prompt is {length:,} long, {limit:,} is the limit", hint="shorten the prompt")
    if sum(map(len, ask.task.continuations)) > limit:
        raise PromptError(f"The choices have more than {limit:,} characters", hint="give fewer or shorter ones")
