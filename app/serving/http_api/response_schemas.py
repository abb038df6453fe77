"""Typed bodies and answers of `/v1/responses`, with OpenAI's names."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from llama_adapter.app.serving.http_api.schemas import (
    LABEL_MARK,
    MAX_MESSAGES,
    AnswerSchema,
    AnyMessage,
    CommonRequest,
    Extensions,
    LenientPart,
    Limit,
    Metadata,
    No,
    NoList,
    Part,
    PictureUsed,
    TextFormat,
    TextOr,
    TokenLogprob,
    TopLogprobs,
    kind_of_message,
)


class OtherItem(LenientPart):
    """What models do not see of earlier turns, such as a call of a tool and its result."""

    type: str = Field(json_schema_extra={"not": {"enum": ["message", "item_reference"]}})


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

    format: Annotated[TextFormat | JsonSchemaText, Discriminator("type")] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Part):
    """The model does not reason."""

    effort: Literal["none"] | None = None
    summary: None = None
    generate_summary: None = None


class ResponseStreamOptions(Part):
    """Options of a stream."""

    include_obfuscation: No | None = None


class NeutralResponseParameters(Part):
    """As `NeutralParameters`. Most of these parameters need a server that stores responses."""

    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    background: No | None = None
    context_management: None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    text: TextConfig | None = None


class ResponsesRequest(NeutralResponseParameters, CommonRequest):
    """A question, usually about a picture. A parameter that is null has its default."""

    input: TextOr[str, Items]
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: Limit | None = Field(None, description="Default: 64.")
    max_tool_calls: Limit | None = Field(None, description="Accepted, without effect.")
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        None,
        max_length=10,
        description="With `message.output_text.logprobs`, the answer has the log-probability of each generated token.",
    )
    top_logprobs: TopLogprobs | None = Field(None, description="As in chat requests; requires `include`.")
    stream_options: ResponseStreamOptions | None = None


class OutputTextPart(BaseModel):
    """The text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: NoList
    logprobs: list[TokenLogprob]


class OutputMessage(BaseModel):
    """The answer as a message."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputTextPart]


class IncompleteDetails(BaseModel):
    """Why the answer is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseError(BaseModel):
    """Why there is no complete answer, in a stream."""

    code: str
    message: str


class InputDetails(BaseModel):
    """None of the tokens is cached."""

    cached_tokens: Literal[0]
    cache_write_tokens: Literal[0]


class OutputDetails(BaseModel):
    """None of the tokens is reasoning."""

    reasoning_tokens: Literal[0]


class ResponseUsage(BaseModel):
    """Tokens of the prompt in its template, and of the answer. A picture counts as none."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseBody(Extensions):
    """A whole answer, with the parameters of its request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: Metadata
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: Literal["none", "auto"]
    tools: NoList
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    picture_used: PictureUsed = None
