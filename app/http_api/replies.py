"""What the service answers, as OpenAI names it: plain models, made from answers elsewhere."""

from typing import Literal

from pydantic import BaseModel, Field


class ErrorDetail(BaseModel):
    """What went wrong, and which part of the request is meant."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """Every answer with an error status."""

    error: ErrorDetail


class Usage(BaseModel):
    """Tokens of the prompt in its template, and of the answer. A picture counts as none."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerMessage(BaseModel):
    """The answer as a message."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Choice(BaseModel):
    """The only one: `n` is 1. Extensions are left out where there is nothing to tell."""

    index: Literal[0] = 0
    message: AnswerMessage
    finish_reason: Literal["stop", "length"]
    logprobs: None = None
    answer_probabilities: dict[str, float] | None = Field(
        None, description="An extension, with `answer_choices`: the probability of each, they sum to 1."
    )
    unfamiliar: bool | None = Field(
        None,
        description="An extension, of models that can tell: whether the picture is unlike those that the model was "
        "trained on, so that the answer may mean nothing.",
    )


class ChatCompletion(BaseModel):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    system_fingerprint: str


class Model(BaseModel):
    """A model that requests may name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "llama-adapter"


class ModelList(BaseModel):
    """The models there are: one."""

    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    """How the service is."""

    status: Literal["loading", "ready", "restarting", "draining", "failed", "closed"]
    is_stalled: bool
    restarts: int
    last_error: str | None
    running: int
    waiting: int
    reading: int  # pictures
    slow_reading: int  # of them, those that take long
    uptime_s: float


class Readiness(BaseModel):
    """Whether requests are taken."""

    ready: bool
    status: Literal["loading", "ready", "restarting", "draining", "failed", "closed"]
