"""What a chat request may hold, as OpenAI names it: the models its JSON is checked by, and nothing done with it."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

_INT32 = 2**31 - 1
# Labels of alternatives begin so: they are no names of the request, and are left out where an error is told.
LABEL_MARK = "as "
MAX_MESSAGES = 1000
MAX_PARTS = 100
MAX_CHOICES = 100
MAX_STOPS = 4
MAX_STOP_CHARS = 200


class Part(BaseModel):
    """Base of all parts of a request: what it does not know, it refuses."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True, frozen=True)


class TextPart(Part):
    """Text in a list of parts."""

    type: Literal["text"]
    text: str


class ImageUrl(Part):
    """A picture as a data URI or, of hosts that the server allows, as a URL."""

    url: str = Field(min_length=1, description="`data:image/png;base64,...`")
    detail: Literal["auto", "low", "high", "original"] = Field(
        "auto", description="Accepted, without effect: a picture always has the size that the model sees."
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


def _as_whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


TextParts = Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]
AnyParts = Annotated[
    list[Annotated[TextPart | ImagePart, Discriminator("type")]],
    Field(min_length=1, max_length=MAX_PARTS, fail_fast=True),
]
TextContent = Annotated[
    Annotated[str, Tag(f"{LABEL_MARK}text")] | Annotated[TextParts, Tag(f"{LABEL_MARK}list")],
    Discriminator(_text_or_list),
]
AnyContent = Annotated[
    Annotated[str, Tag(f"{LABEL_MARK}text")] | Annotated[AnyParts, Tag(f"{LABEL_MARK}list")],
    Discriminator(_text_or_list),
]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOPS)]
Stop = Annotated[
    Annotated[StopText, Tag(f"{LABEL_MARK}text")] | Annotated[StopTexts, Tag(f"{LABEL_MARK}list")],
    Discriminator(_text_or_list),
]
NoList = Annotated[list[Any], Field(max_length=0)]
# Not Literal, which takes true for 1 and 0 for false.
No = Annotated[bool, AfterValidator(_refuse_true), Field(json_schema_extra={"const": False})]
_whole = BeforeValidator(_as_whole)  # 1.0 is a whole number to JSON; last, so that the schema keeps the limits
One = Annotated[int, Field(ge=1, le=1), _whole]
NoNumber = Annotated[int, Field(ge=0, le=0), _whole]
Limit = Annotated[int, Field(ge=1, le=_INT32), _whole]
Count = Annotated[int, Field(ge=0, le=_INT32), _whole]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), _whole]
NoPenalty = Annotated[float, Field(ge=0, le=0)]


class SystemMessage(Part):
    """The instruction, to which the last user message then is the input."""

    role: Literal["system", "developer"]
    content: TextContent
    name: str | None = None


class UserMessage(Part):
    """A question, a picture, or both."""

    role: Literal["user"]
    content: AnyContent
    name: str | None = None


class AssistantMessage(Part):
    """An earlier answer. It is not shown to the model, which was trained on single turns."""

    role: Literal["assistant"]
    content: TextContent | None = None
    name: str | None = None
    refusal: str | None = None
    audio: None = None
    annotations: NoList | None = None
    function_call: None = None
    tool_calls: NoList | None = None
    parsed: None = None  # of no request, but the clients' helpers put it into what is sent back


Message = Annotated[SystemMessage | UserMessage | AssistantMessage, Discriminator("role")]


class StreamOptions(Part):
    """What a stream has beside text."""

    include_usage: bool | None = Field(None, description="Send a last chunk with the token counts.")
    include_obfuscation: No | None = None


class TextFormat(Part):
    """Plain text, the only format of answers."""

    type: Literal["text"]


class NeutralParameters(Part):
    """Parameters that this server does not support: accepted at a value that changes nothing, refused otherwise."""

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


# What may be sent of those, as JSON; of the others only null.
NEUTRAL_VALUES: Mapping[str, str] = {
    "n": "1",
    "logprobs": "false",
    "top_logprobs": "0",
    "frequency_penalty": "0",
    "presence_penalty": "0",
    "logit_bias": "{}",
    "tools": "[]",
    "tool_choice": '"none"',
    "parallel_tool_calls": "true",
    "functions": "[]",
    "function_call": '"none"',
    "response_format": '{"type": "text"}',
    "modalities": '["text"]',
    "reasoning_effort": '"none"',
    "verbosity": '"medium"',
    "service_tier": '"auto"',
    "store": "false",
    "metadata": "{}",
}


class ChatRequest(NeutralParameters):
    """A question about a picture. Parameters that are null have their default."""

    model: str = Field(description="The name of the loaded model (see `/v1/models`), or `default`.")
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: Limit | None = Field(None, description="64 where nothing is given.")
    max_tokens: Limit | None = Field(None, description="The older name of `max_completion_tokens`.")
    temperature: float | None = Field(
        None, ge=0, le=2, description="0 where nothing is given: the likeliest answer, the same every time."
    )
    top_p: float | None = Field(
        None, ge=0, le=1, description="0.75 where nothing is given; of effect with a temperature above 0."
    )
    top_k: Count | None = Field(None, description="An extension. 0 or nothing keeps every token.")
    seed: Seed | None = Field(None, description="Equal seeds draw equal answers.")
    stop: Stop | None = Field(None, description="The answer ends before the first of these.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    answer_choices: (
        Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(min_length=2, max_length=MAX_CHOICES, json_schema_extra={"uniqueItems": True}),
        ]
        | None
    ) = Field(
        None,
        description="An extension. The answer is the likeliest of these texts, and the choice holds the probability of "
        "each as `answer_probabilities`. Parameters of sampling and `stop` have no effect then.",
    )
    user: str | None = Field(None, description="Accepted, without effect.")
    safety_identifier: str | None = Field(None, description="Accepted, without effect.")
    prompt_cache_key: str | None = Field(None, description="Accepted, without effect.")
