"""Typed bodies and answers of the API, with OpenAI's names."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, create_model

from llama_adapter.app.online.types import State
from llama_adapter.app.tasks.entry import RequestField
from llama_adapter.app.tasks.registry import options

_INT32 = 2**31 - 1
LABEL_MARK = "as "  # starts the tags of unions; they are no names of the request, so errors leave them out
MAX_MESSAGES = 1000
MAX_PARTS = 100
MAX_TEXTS = 100  # in a list of a task's field
MAX_STOPS = 4
MAX_STOP_CHARS = 200
LARGEST_SEED = 2**63 - 1


class Part(BaseModel):
    """Base of all parts of a request: strict types, unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True, frozen=True)


class TextPart(Part):
    """Text in a list of parts."""

    type: Literal["text"]
    text: str


class ImageUrl(Part):
    """A picture as a data URI, or as a URL of a host that the server allows."""

    url: str = Field(min_length=1, description="`data:image/png;base64,...`")
    detail: Literal["auto", "low", "high", "original"] = Field(
        "auto", description="Accepted, without effect: the model sees every picture in one size."
    )


class ImagePart(Part):
    """A picture in a list of parts."""

    type: Literal["image_url"]
    image_url: ImageUrl


def _text_or_list(value: Any) -> str:
    return f"{LABEL_MARK}text" if isinstance(value, str) else f"{LABEL_MARK}list"


def _refuse_true(value: bool) -> bool:
    if value:
        raise ValueError("must be false")
    return value


def _refuse_equal(texts: list[str]) -> list[str]:
    if len(set(texts)) < len(texts):
        raise ValueError("must be different texts")
    return texts


def _as_whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


TextParts = Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]
AnyParts = Annotated[
    list[Annotated[TextPart | ImagePart, Discriminator("type")]],
    Field(min_length=1, max_length=MAX_PARTS, fail_fast=True),
]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOPS)]
_Text = TypeVar("_Text")
_List = TypeVar("_List")
TextOrList = Annotated[
    Annotated[_Text, Tag(f"{LABEL_MARK}text")] | Annotated[_List, Tag(f"{LABEL_MARK}list")],
    Discriminator(_text_or_list),
]
NoList = Annotated[list[Any], Field(max_length=0)]
# Not Literal, which accepts true for 1 and 0 for false.
No = Annotated[bool, AfterValidator(_refuse_true), Field(json_schema_extra={"const": False})]
_whole = BeforeValidator(_as_whole)  # JSON has 1.0 for 1; last in each type, so that the schema keeps the limits
One = Annotated[int, Field(ge=1, le=1), _whole]
NoNumber = Annotated[int, Field(ge=0, le=0), _whole]
Limit = Annotated[int, Field(ge=1, le=_INT32), _whole]
Count = Annotated[int, Field(ge=0, le=_INT32), _whole]
Seed = Annotated[int, Field(ge=-LARGEST_SEED - 1, le=LARGEST_SEED), _whole]
NoPenalty = Annotated[float, Field(ge=0, le=0)]
WithoutEffect = Annotated[str | None, Field(description="Accepted, without effect.")]


class SystemMessage(Part):
    """The instruction. The text of the last user message is then its input."""

    role: Literal["system", "developer"]
    content: TextOrList[str, TextParts]
    name: str | None = None


class UserMessage(Part):
    """A question, a picture, or both."""

    role: Literal["user"]
    content: TextOrList[str, AnyParts]
    name: str | None = None


class AssistantMessage(Part):
    """An earlier answer. The model was trained on single turns and does not see it."""

    role: Literal["assistant"]
    content: TextOrList[str, TextParts] | None = None
    name: str | None = None
    refusal: str | None = None
    audio: None = None
    annotations: NoList | None = None
    function_call: None = None
    tool_calls: NoList | None = None
    parsed: None = None  # OpenAI's client adds it to messages that it sends back


Message = Annotated[SystemMessage | UserMessage | AssistantMessage, Discriminator("role")]


class StreamOptions(Part):
    """What a stream has besides text."""

    include_usage: bool | None = Field(None, description="Send a last chunk with the token counts.")
    include_obfuscation: No | None = None


class TextFormat(Part):
    """Plain text, the only format of answers."""

    type: Literal["text"]


class NeutralParameters(Part):
    """Unsupported parameters: accepted at a value that changes nothing, refused otherwise."""

    n: One | None = None
    logprobs: No | None = None
    top_logprobs: NoNumber | None = None
    frequency_penalty: NoPenalty | None = None
    presence_penalty: NoPenalty | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    tools: NoList | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: NoList | None = None
    function_call: Literal["none", "auto"] | None = None
    response_format: TextFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    moderation: None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["medium"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: No | None = None
    metadata: Annotated[dict[str, str], Field(max_length=0)] | None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None


class ChatRequest(NeutralParameters):
    """A question about a picture. A parameter that is null has its default."""

    model: str = Field(description="The name of the loaded model (see `/v1/models`), or `default`.")
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: Limit | None = Field(None, description="Default: 64.")
    max_tokens: Limit | None = Field(None, description="The older name of `max_completion_tokens`.")
    temperature: float | None = Field(None, ge=0, le=2, description="Default: 0, greedy decoding.")
    top_p: float | None = Field(None, ge=0, le=1, description="Default: 0.75. Used with a temperature above 0.")
    top_k: Count | None = Field(None, description="Extension. Default: 0, all tokens.")
    seed: Seed | None = Field(None, description="Equal seeds give equal samples.")
    stop: TextOrList[StopText, StopTexts] | None = Field(
        None, description="The answer ends before the first of these texts."
    )
    output_ids: bool | None = Field(
        None, description="Extension: `answer_details.output_ids` has the token ids of the answer."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: WithoutEffect = None
    safety_identifier: WithoutEffect = None
    prompt_cache_key: WithoutEffect = None

    def task_values(self) -> dict[str, Any]:
        """The values of options that have a field, by the option's name."""
        return {option.name: getattr(self, option.request.name) for option in options() if option.request is not None}


def chat_request() -> type[ChatRequest]:
    """`ChatRequest` with the fields of all tasks."""
    fields: dict[str, Any] = {
        field.name: (_kind(field) | None, Field(None, description=f"Extension. {field.description}"))
        for field in (option.request for option in options())
        if field is not None
    }
    return create_model("ChatRequest", __base__=ChatRequest, __doc__=ChatRequest.__doc__, **fields)


def _kind(field: RequestField) -> Any:
    text = Annotated[str, Field(min_length=1)]
    if field.min_texts is None:
        return text
    bounds = Field(min_length=field.min_texts, max_length=MAX_TEXTS, json_schema_extra={"uniqueItems": True})
    return Annotated[list[text], bounds, AfterValidator(_refuse_equal)]


# A red square, 16 pixels wide.
EXAMPLE_PICTURE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQAQMAAAAlPW0iAAAABlBMVEWWlpbcHh4C6O6xAAAAFElEQVR42mNgQAL8H5gYGDARMgAAI20BDofI/jkAAAAASUVORK5CYII="
)
EXAMPLE = {
    "model": "default",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": EXAMPLE_PICTURE}},
                {"type": "text", "text": "What color is the square?"},
            ],
        }
    ],
}


class ErrorDetail(BaseModel):
    """What is wrong, and which part of the request causes it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """The body of every answer with an error status."""

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
    """The only choice: `n` is 1. Extensions without a value are left out."""

    index: Literal[0] = 0
    message: AnswerMessage
    finish_reason: Literal["stop", "length"]
    logprobs: None = None
    answer_probabilities: dict[str, float] | None = Field(
        None, description="Extension, with `answer_choices`: the probability of each. They sum to 1."
    )
    answer_details: dict[str, Any] | None = Field(None, description="Extension: what else the task gives, by name.")
    unfamiliar: bool | None = Field(
        None,
        description="Extension, if the model can tell: the picture is out of the training distribution, so the answer "
        "may be meaningless.",
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
    """The loaded model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "llama-adapter"


class ModelList(BaseModel):
    """All models: the loaded one."""

    object: Literal["list"] = "list"
    data: list[Model]


class Readiness(BaseModel):
    """Whether the service accepts requests."""

    ready: bool
    status: State


class Health(BaseModel):
    """The state of the service."""

    status: State
    is_stalled: bool
    restarts: int
    last_error: str | None
    running: int
    waiting: int
    reading: int = Field(description="Pictures that are being read.")
    slow_reading: int = Field(description="Pictures that are being read in the slow lane.")
    uptime_s: float
