"""A chat request -> what is asked of the model: one picture, an instruction, an input. Reads no picture."""

from collections.abc import Sequence
from dataclasses import dataclass

from llama_adapter.app.http_api.problems import ApiError
from llama_adapter.app.http_api.schemas import (
    AssistantMessage,
    ChatRequest,
    ImagePart,
    Message,
    SystemMessage,
    TextPart,
    UserMessage,
)
from llama_adapter.app.tasks.prompts import Prompt
from llama_adapter.llm.engine.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A chat request as the service takes it, but for the picture, which is still a URL."""

    picture_url: str
    prompt: Prompt | None  # None: the model's own caption prompt
    sampling: SamplingParams
    choices: tuple[str, ...] | None
    stop: tuple[str, ...]
    num_ignored_turns: int  # earlier messages of which something is not shown to the model


def understand(request: ChatRequest) -> Question:
    """The question of a request; raises ApiError where there is none, or more than one picture."""
    _check_together(request)
    last = len(request.messages) - 1
    if not isinstance(request.messages[last], UserMessage):
        raise ApiError(
            "The last message must be of the user: its text is what is asked.", code="invalid_value", param="messages"
        )
    picture_place, picture_url = _newest_picture(request.messages)
    choices = request.answer_choices
    return Question(
        picture_url=picture_url,
        prompt=_prompt(request.messages),
        sampling=_sampling(request),
        choices=None if choices is None else tuple(choices),
        stop=() if choices is not None else _stop(request),
        num_ignored_turns=sum(
            _is_ignored(message, has_picture=place == picture_place)
            for place, message in enumerate(request.messages[:last])
        ),
    )


def _check_together(request: ChatRequest) -> None:
    """Parameters that are right alone and not with each other."""
    if request.stream_options is not None and not request.stream:
        raise ApiError("`stream_options` goes with `stream`: true.", code="invalid_value", param="stream_options")
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise ApiError(
            "`max_tokens` and `max_completion_tokens` mean the same and differ: leave one out.",
            code="invalid_value",
            param="max_tokens",
        )
    choices = request.answer_choices
    if choices is not None and len(set(choices)) < len(choices):
        raise ApiError("`answer_choices` must be different texts.", code="invalid_value", param="answer_choices")


def _newest_picture(messages: Sequence[Message]) -> tuple[int, str]:
    """Place of the newest message with pictures, and its one picture's URL."""
    for place in reversed(range(len(messages))):
        urls = _picture_urls(messages[place])
        if len(urls) == 1:
            return place, urls[0]
        if urls:
            raise ApiError(
                f"A question is about one picture, and message {place} has {len(urls)}: send a request for each.",
                code="too_many_images",
                param=f"messages[{place}].content",
            )
    raise ApiError(
        "There is no picture in the messages: send one as a part of type image_url.",
        code="missing_image",
        param="messages",
    )


def _prompt(messages: Sequence[Message]) -> Prompt | None:
    """A system text is the instruction and the user's its input; one alone is the instruction."""
    system = "\n".join(filter(str.strip, (_text(item) for item in messages if isinstance(item, SystemMessage))))
    asked = _text(messages[-1])
    if system and asked.strip():
        return system, asked
    return system or (asked if asked.strip() else None)


def _sampling(request: ChatRequest) -> SamplingParams:
    limit = request.max_completion_tokens or request.max_tokens
    return SamplingParams(
        max_new_tokens=SamplingParams.max_new_tokens if limit is None else limit,
        temperature=SamplingParams.temperature if request.temperature is None else request.temperature,
        top_p=SamplingParams.top_p if request.top_p is None else request.top_p,
        top_k=SamplingParams.top_k if request.top_k is None else request.top_k,
        seed=request.seed,
    )


def _stop(request: ChatRequest) -> tuple[str, ...]:
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())


def _is_ignored(message: Message, *, has_picture: bool) -> bool:
    """Whether the model does not see all of an earlier message; `has_picture`: it holds the picture of the question."""
    if isinstance(message, SystemMessage):
        return False
    return bool(_text(message).strip()) or (bool(_picture_urls(message)) and not has_picture)


def _text(message: Message) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content or () if isinstance(part, TextPart))


def _picture_urls(message: Message) -> list[str]:
    if isinstance(message, AssistantMessage | SystemMessage) or isinstance(message.content, str):
        return []
    return [part.image_url.url for part in message.content if isinstance(part, ImagePart)]
