"""Typed bodies of requests, with OpenAI's names, and of the answers about models and the server's state."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    create_model,
    model_validator,
)

from llama_adapter.app.captioning.tasks.registry import options
from llama_adapter.app.serving.online.types import State

_INT32 = 2**31 - 1
NO_LIMIT = _INT32  # value of a `Limit` that is given as -1
LABEL_MARK = "as "  # prefix of union tags. Tags are not names in the request, so error messages omit them
MAX_MESSAGES = 1000
MAX_PARTS = 100
MAX_TEXTS = 100  # in a list of a task's field
MAX_ANSWERS = 16  # limit of `n`
MAX_PROPERTIES = 16  # of a JSON schema
MAX_QUESTIONS = 32  # per request: `n` times the number of properties or prompts
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 4
MAX_STOP_CHARS = 200
LARGEST_SEED = 2**63 - 1


def _without_nulls(value: Any) -> Any:
    return {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else value


class Part(BaseModel):
    """Base of all parts of a request: strict types, null is as absent, unknown fields are refused."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        hide_input_in_errors=True,
        frozen=True,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )
    _present = model_validator(mode="before")(_without_nulls)


class LenientPart(Part):
    """Base of those whose unknown fields have no effect."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"additionalProperties": True})


def _text_or_other(value: Any) -> str:
    return f"{LABEL_MARK}text" if isinstance(value, str) else f"{LABEL_MARK}other"


_Text = TypeVar("_Text")
_Other = TypeVar("_Other")
TextOr = Annotated[
    Annotated[_Text, Tag(f"{LABEL_MARK}text")] | Annotated[_Other, Tag(f"{LABEL_MARK}other")],
    Discriminator(_text_or_other),
]


class TextPart(LenientPart):
    """Text in a list of parts."""

    type: Literal["text", "input_text", "output_text"] | None = None
    text: str


class ImageUrl(LenientPart):
    """A picture as a data URI, or as a URL of a host that the server allows. The text alone is accepted too."""

    url: str = Field(min_length=1, description="`data:image/png;base64,...`")


class ImagePart(LenientPart):
    """A picture in a list of parts. `detail` has no effect: the model sees every picture in one size."""

    type: Literal["image_url", "input_image"] | None = None
    image_url: TextOr[Annotated[str, Field(min_length=1)], ImageUrl]
    file_id: None = None

    @property
    def url(self) -> str:
        """The picture's data URI or URL: `image_url` is this string, or an object that has it."""
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


_PART_KINDS = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    **dict.fromkeys(("image_url", "input_image"), "picture"),
}


class OtherPart(LenientPart):
    """What models do not see of an earlier turn, such as a refusal or a call of a tool."""

    type: str = Field(json_schema_extra={"not": {"enum": [*_PART_KINDS]}})


def _kind_of_part(part: Any) -> str | None:
    """The union tag of a part; a part without a type is known by its keys."""
    given = _without_nulls(part) if isinstance(part, dict) else {}
    kind = given.get("type", next((name for name in ("image_url", "text") if name in given), None))
    return f"{LABEL_MARK}{_PART_KINDS.get(kind, 'other')}" if isinstance(kind, str) else None


def _refuse_true(value: bool) -> bool:
    if value:
        raise ValueError("must be false")
    return value


def _refuse_equal(texts: list[str]) -> list[str]:
    if len(set(texts)) < len(texts):
        raise ValueError("must be different texts")
    return texts


def _different_texts(least: int) -> Any:
    text = Annotated[str, Field(pattern=r"\S")]
    bounds = Field(min_length=least, max_length=MAX_TEXTS, json_schema_extra={"uniqueItems": True})
    return Annotated[list[text], bounds, AfterValidator(_refuse_equal)]


def _refuse_images(value: Any) -> Any:
    if value:
        raise ValueError("must be absent; send the picture as a part of type image_url")
    return value


def _refuse_called(tools: list[Any], info: ValidationInfo) -> list[Any]:
    if tools and info.data.get("tool_choice") != "none":
        raise ValueError("must be empty unless `tool_choice` is none")
    return tools


def as_whole(value: Any) -> Any:
    """1 for 1.0; everything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_limit(value: Any) -> Any:
    return NO_LIMIT if value == -1 else as_whole(value)


_by_kind = Discriminator(_kind_of_part, "part_type", "expected the type text or image_url (input_text, input_image)")
_Seen = Annotated[TextPart, Tag(f"{LABEL_MARK}text")] | Annotated[ImagePart, Tag(f"{LABEL_MARK}picture")]
_Unseen = Annotated[OtherPart, Tag(f"{LABEL_MARK}other")]
_parts = Field(max_length=MAX_PARTS, fail_fast=True)
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOPS)]
NoList = Annotated[list[Any], Field(max_length=0)]
# Not Literal, which accepts true for 1 and 0 for false.
No = Annotated[bool, AfterValidator(_refuse_true), Field(json_schema_extra={"const": False})]
_whole = BeforeValidator(as_whole)  # accepts 1.0 for 1. Last in each type, so that the JSON schema keeps the limits
One = Annotated[int, Field(ge=1, le=1), _whole]
NoNumber = Annotated[int, Field(ge=0, le=0), _whole]
_Positive = Annotated[int, Field(ge=1, le=_INT32)]
_PositiveOrNone = Literal[-1] | _Positive  # -1 means no limit, as in llama.cpp and LM Studio
Limit = Annotated[_Positive, BeforeValidator(_as_limit, json_schema_input_type=_PositiveOrNone)]
Seed = Annotated[int, Field(ge=-LARGEST_SEED - 1, le=LARGEST_SEED), _whole]
TopK = Annotated[int, Field(ge=-1, le=_INT32), _whole]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), _whole]
Answers = Annotated[int, Field(ge=1, le=MAX_ANSWERS), _whole]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TemplateValues = dict[
    Annotated[str, Field(min_length=1, max_length=64)],
    bool | int | float | Annotated[str, Field(max_length=200)] | None,
]
Neutral = Annotated[float, Field(ge=1, le=1)]  # a factor that changes nothing
Effort = Literal["none", "minimal", "low"]  # of reasoning, which models do not do
Metadata = Annotated[dict[str, str], BeforeValidator(_without_nulls, json_schema_input_type=dict[str, str | None])]


class AskingMessage(LenientPart):
    """A text of the system, a question, a picture, or several of these."""

    role: Literal["system", "developer", "user"]
    content: TextOr[str, Annotated[list[Annotated[_Seen, _by_kind]], _parts]] | None = ""
    # Of Ollama: an answer without them would be wrong.
    images: Annotated[NoList, BeforeValidator(_refuse_images, json_schema_input_type=NoList)] | None = None


class EarlierMessage(LenientPart):
    """An earlier answer, or the result of a tool. Only a model for chat sees the answers; no model sees tools."""

    role: Literal["assistant", "tool", "function"]
    content: TextOr[str, Annotated[list[Annotated[_Seen | _Unseen, _by_kind]], _parts]] | None = ""
    tool_calls: Any = None


def kind_of_message(message: Any) -> str | None:
    """The union tag of a message; `as item` is what `/v1/responses` has beside messages, such as a call of a tool."""
    given = _without_nulls(message) if isinstance(message, dict) else {}
    match given.get("role"), given.get("type", "message"):
        case "system" | "developer" | "user", _:
            return f"{LABEL_MARK}asking"
        case "assistant" | "tool" | "function", _:
            return f"{LABEL_MARK}earlier"
        case _, str(kind) if kind not in ("message", "item_reference"):
            return f"{LABEL_MARK}item"
    return None


AnyMessage = (
    Annotated[AskingMessage, Tag(f"{LABEL_MARK}asking")] | Annotated[EarlierMessage, Tag(f"{LABEL_MARK}earlier")]
)
Message = Annotated[AnyMessage, Discriminator(kind_of_message, "message_role", "role is missing or unknown")]


class StreamOptions(Part):
    """Options of a stream."""

    include_usage: bool | None = Field(
        None, description="Send a last chunk with the token counts; responses have them."
    )
    include_obfuscation: No | None = None


class TextFormat(Part):
    """Plain text."""

    type: Literal["text"]


class AnswerSchema(Part):
    """A JSON schema. It is asked as questions, or guides the whole answer: see docs/http-api.md."""

    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: TextOr[str, bool] | None = Field(None, description="Without effect: answers follow the schema.")


class JsonSchemaFormat(Part):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: AnswerSchema


class JsonObjectFormat(Part):
    """Any JSON object, or as llama.cpp takes it, one that follows a schema."""

    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class StructuredOutputs(Part):
    """The form of the answer, as vLLM takes it: one of these."""

    choice: _different_texts(2) | None = Field(None, description="As `answer_choices`.")  # type: ignore[valid-type]
    json_: TextOr[str, dict[str, Any]] | None = Field(None, alias="json", description="A JSON schema.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    regex: str | None = None


# Name -> type of parameters of OpenAI, vLLM and llama.cpp that no code reads. These are accepted at a value that
# changes nothing, and refused otherwise:
UNSUPPORTED: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("audio", "prediction", "web_search_options", "moderation", "guided_grammar", "grammar"), None),
    **dict.fromkeys(("prompt_cache_options", "prompt_cache_retention", "prompt_logprobs"), None),
    **dict.fromkeys(("store", "use_beam_search", "ignore_eos", "include_stop_str_in_output"), No),
    **dict.fromkeys(("continue_final_message", "echo"), No),
    "tools": Annotated[list[Any], Field(description="Only if `tool_choice` is none."), AfterValidator(_refuse_called)],
    **dict.fromkeys(("functions", "stop_token_ids"), NoList),
    **dict.fromkeys(("min_tokens", "mirostat", "n_probs"), NoNumber),
    **dict.fromkeys(("typical_p", "repeat_penalty", "length_penalty"), Neutral),
    "best_of": One,
    "logit_bias": Annotated[dict[str, Any], Field(max_length=0)],
    "modalities": Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)],
    "function_call": Literal["none", "auto"],
    "reasoning_effort": Effort,
    "verbosity": Literal["medium"],
    "service_tier": Literal["auto", "default"],
}
IGNORED: Final[Mapping[str, Any]] = {  # accepted, without effect
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key", "request_id"), str),
    **dict.fromkeys(("id_slot", "priority", "repeat_last_n"), int),
    **dict.fromkeys(("cache_prompt", "skip_special_tokens", "spaces_between_special_tokens"), bool),
    **dict.fromkeys(("add_generation_prompt", "add_special_tokens", "timings_per_token"), bool),
}


class CommonRequest(Part):
    """The fields that all requests share. A parameter that is null has its default."""

    model: str | None = Field(
        None, description="A name that `/v1/models` lists, or `default`. Default: the loaded model."
    )
    temperature: float | None = Field(None, ge=0, le=2, description="Default: 0, greedy decoding.")
    top_p: float | None = Field(None, ge=0, le=1, description="Default: 0.75. Used with a temperature above 0.")
    top_k: TopK | None = Field(None, description="Extension. Default: 0 (or -1), all tokens.")
    min_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Extension. Default: 0. Drops tokens below this share of the likeliest one's probability.",
    )
    seed: Seed | None = Field(None, description="Equal seeds give equal samples. -1: a new seed each time.")
    presence_penalty: Penalty | None = Field(
        None, description="Default: 0. Subtracted from the logit of each token that the answer has."
    )
    frequency_penalty: Penalty | None = Field(
        None, description="Default: 0. Subtracted from a token's logit each time that it occurs in the answer."
    )
    repetition_penalty: float | None = Field(
        None,
        ge=0.01,
        le=100,
        description="Extension. Default: 1. Divides the positive logits of tokens that prompt or answer have, and "
        "multiplies the negative ones.",
    )
    stop: TextOr[StopText, StopTexts] | None = Field(
        None, description="The answer ends before the first of these texts."
    )
    json_schema: dict[str, Any] | None = Field(None, description="As `response_format`, in the form of llama.cpp.")
    guided_json: TextOr[str, dict[str, Any]] | None = Field(None, description="The same in the form of vLLM.")
    guided_regex: str | None = Field(
        None, description="Extension, as in vLLM: the whole answer matches this regular expression."
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="The same in the newer form of vLLM.")
    output_ids: bool | None = Field(
        None, description="Extension: `answer_details.output_ids` has the token ids of the answer."
    )
    text_prefix: Literal["none", "zeros"] | None = Field(
        None,
        description="Extension, without a picture: what the model attends to instead, a picture of zeros or nothing. "
        "Default: as the model was trained.",
    )
    chat_template_kwargs: TemplateValues | None = Field(
        None,
        description="Extension, as in vLLM: further variables of the model's own chat template, such as "
        "`enable_thinking`. Other templates have none.",
    )
    response_format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Discriminator("type")] | None = None
    stream: bool | None = None
    # Without effect; responses repeat them.
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    metadata: Metadata | None = None

    def task_values(self) -> dict[str, Any]:
        """Option name -> value, for the options that have a request field."""
        given = {option.name: getattr(self, option.request.name) for option in options() if option.request is not None}
        own = None if self.structured_outputs is None else self.structured_outputs.choice
        return given if own is None else {**given, "choices": own}


class ChatRequest(CommonRequest):
    """A question, usually about a picture. A parameter that is null has its default."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: Limit | None = Field(None, description="Default: 64. -1: until the context is full.")
    max_tokens: Limit | None = Field(None, description="The older name of `max_completion_tokens`.")
    n: Answers | None = Field(None, description="Number of answers. With a seed, answer i has seed + i.")
    logprobs: bool | None = Field(
        None,
        description="The log-probability of each generated token, before temperature, `top_p` and `top_k`. "
        "Scored answers have none.",
    )
    top_logprobs: TopLogprobs | None = Field(
        None, description="With `logprobs`: the likeliest tokens in the place of each generated token."
    )
    stream_options: StreamOptions | None = None


class CompletionRequest(CommonRequest):
    """Texts to continue, without a template. A parameter that is null has its default."""

    prompt: TextOr[
        Annotated[str, Field(min_length=1)],
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_ANSWERS)],
    ] = Field(description="A text, or several, each of which gets `n` answers.")
    image_url: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Extension: the picture that the texts are about, `data:image/png;base64,...`."
    )
    max_tokens: Limit | None = Field(None, description="Default: 16.")
    n: Answers | None = Field(None, description="Answers per prompt. With a seed, answer i of a prompt has seed + i.")
    logprobs: Annotated[int, Field(ge=0, le=5), _whole] | None = Field(
        None,
        description="The log-probability of each generated token, and of this number of the likeliest in its place.",
    )
    suffix: None = None
    stream_options: StreamOptions | None = None


class OtherItem(LenientPart):
    """What models do not see of earlier turns, such as a call of a tool and its result."""

    type: str = Field(json_schema_extra={"not": {"enum": ["message", "item_reference"]}})
    output: Any = Field(None, description="Result of a tool. Adapters see its pictures.")


_NO_ITEM = "expected a message with a role; this server stores no items to refer to"
Item = Annotated[
    AnyMessage | Annotated[OtherItem, Tag(f"{LABEL_MARK}item")],
    Discriminator(kind_of_message, "message_role", _NO_ITEM),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class JsonSchemaText(AnswerSchema):
    """JSON that follows a schema."""

    type: Literal["json_schema"]


class TextConfig(Part):
    """The form of the answer's text."""

    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaText, Discriminator("type")] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Part):
    """The model does not reason."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: None = None


UNSUPPORTED_IN_RESPONSES: Final[Mapping[str, Any]] = {  # most of them need a server that stores responses
    **dict.fromkeys(("previous_response_id", "conversation", "prompt", "context_management"), None),
    "background": No,
    "reasoning": Reasoning,
    "truncation": Literal["disabled"],
}


class ResponsesRequest(CommonRequest):
    """A question, usually about a picture. A parameter that is null has its default."""

    input: TextOr[str, Items]
    instructions: str | None = Field(None, description="A system message before the input.")
    text: TextConfig | None = None
    max_output_tokens: Limit | None = Field(None, description="Default: 64.")
    max_tool_calls: Limit | None = Field(None, description="Accepted, without effect.")
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        None,
        max_length=10,
        description="With `message.output_text.logprobs`, the answer has the log-probability of each generated token.",
    )
    top_logprobs: TopLogprobs | None = Field(None, description="As in chat requests; requires `include`.")
    stream_options: StreamOptions | None = None


_Request = TypeVar("_Request", bound=CommonRequest)


def with_all_fields(model: type[_Request]) -> type[_Request]:
    """A request model with the parameters that no code reads and, but for completions, with the fields of all tasks."""
    kinds = {**UNSUPPORTED, **IGNORED, **(UNSUPPORTED_IN_RESPONSES if issubclass(model, ResponsesRequest) else {})}
    fields: dict[str, Any] = {name: (kind if kind is None else kind | None, None) for name, kind in kinds.items()}
    task_fields = () if issubclass(model, CompletionRequest) else [option.request for option in options()]
    for field in filter(None, task_fields):
        kind = Annotated[str, Field(min_length=1)] if field.min_texts is None else _different_texts(field.min_texts)
        names, about = AliasChoices(field.name, *field.aliases), f"Extension. {field.description}"
        fields[field.name] = (kind | None, Field(None, validation_alias=names, description=about))
    return create_model(model.__name__, __base__=model, __doc__=model.__doc__, **fields)


class Architecture(BaseModel):
    """What goes in and comes out, as in the list of OpenRouter (openrouter.ai/docs/models), which many clients read."""

    input_modalities: list[Literal["text", "image"]]
    output_modalities: list[Literal["text"]] = ["text"]


class Model(BaseModel):
    """The loaded model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "llama-adapter"
    max_model_len: int = Field(description="Tokens of a prompt and its answer, under the name that vLLM gives them.")
    architecture: Architecture


class ModelList(BaseModel):
    """The names of the loaded model."""

    object: Literal["list"] = "list"
    data: list[Model]


class Readiness(BaseModel):
    """Whether the service accepts requests."""

    ready: bool
    status: State


class Health(BaseModel):
    """The state of the service, made of its `ServiceStatus`."""

    model_config = ConfigDict(from_attributes=True)

    status: State = Field(validation_alias="state")
    is_stalled: bool
    restarts: int
    last_error: str | None
    running: int = Field(validation_alias="num_running")
    waiting: int = Field(validation_alias="num_waiting")
    reading: int = Field(validation_alias="num_reading", description="Pictures that are being read.")
    slow_reading: int = Field(
        validation_alias="num_slow_reading", description="Pictures that are being read in the slow lane."
    )
    uptime_s: Annotated[float, AfterValidator(lambda seconds: round(seconds, 3))]


_RETRY_AFTER = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}


@cache
def documentation() -> dict[str, Any]:
    """What `openapi.yaml` says about the API."""
    text = Path(__file__).with_name("openapi.yaml").read_text(encoding="utf-8")
    documentation: dict[str, Any] = yaml.safe_load(text)
    return documentation


def content_of(schema: str) -> dict[str, Any]:
    """The documentation of a JSON body, by the name of its schema in `openapi.yaml`."""
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def error_replies(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The documentation of these error statuses and of 421, for a route's `responses`."""
    return {
        status: {
            "description": documentation()["errors"][status],
            "content": content_of("ErrorReply"),
            **({"headers": _RETRY_AFTER} if status in (429, 503) else {}),
        }
        for status in (*statuses, 421)
    }
