"""A chat request -> one question about one picture. Reads no picture."""

from collections.abc import Sequence
from dataclasses import dataclass

from llama_adapter.app.http_api.errors import ApiError
from llama_adapter.app.http_api.schemas import (
    AssistantMessage,
    ChatRequest,
    ImagePart,
    Message,
    SystemMessage,
    TextPart,
    UserMessage,
)
from llama_adapter.app.tasks.question import Question
from llama_adapter.app.tasks.registry import question_of
from llama_adapter.llm.engine.sampling_params import SamplingParams


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


def _newest_picture(messages: Sequence[Message]) -> tuple[int, str]:
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


def _prompt(messages: Sequence[Message]) -> dict[str, str]:
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


def _is_ignored(message: Message, *, has_picture: bool) -> bool:
    """Whether the model does not see all of an earlier message; `has_picture`: it holds the question's picture."""
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


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(message, code="invalid_value", param=param)
