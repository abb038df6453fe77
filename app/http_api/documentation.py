"""The OpenAPI schema and its page, which needs no network: what the API says of itself."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from llama_adapter.app.http_api.chat import IGNORED_TURNS
from llama_adapter.app.http_api.examples import EXAMPLE
from llama_adapter.app.http_api.replies import ErrorReply
from llama_adapter.app.http_api.schemas import ChatRequest

TITLE = "LLaMA-Adapter"
SUMMARY = "Questions about pictures, over the chat API that OpenAI's clients speak."
DESCRIPTION = f"""
Point an OpenAI client at `/v1` of this server and ask about one picture at a time.

**How messages become a question.** The model was trained on single questions about single pictures.

- The *picture* is that of the newest message that has one; a message has one picture at most. It is sent as a data URI
  (`data:image/png;base64,...`). URLs are fetched only from hosts that the server was started with.
- The *last message* must be of the user. Its text is the instruction.
- With a *system* or *developer* message, that text is the instruction and the user's text its input, as the two places
  of the model's template. Several system messages are joined by line ends.
- Without any text, the model is asked for a caption.
- *Earlier turns* are accepted and not shown to the model; the header `{IGNORED_TURNS}` counts the messages of which
  something was not shown.

**Choosing among answers.** With `answer_choices` the answer is the likeliest of the given texts, and
`answer_probabilities` has the probability of each.

**Unfamiliar pictures.** Where the model can tell, the choice of an answer has `unfamiliar`: true for a picture unlike
those that the model was trained on, about which the answer may mean nothing. In a stream it comes with the
`finish_reason`, as the probabilities do.

**Defaults** are this product's: the likeliest answer (`temperature` 0), `top_p` 0.75, 64 tokens at most.

**Errors** have OpenAI's form. 429 and 503 come with `Retry-After`. Every answer has an `x-request-id`, by which the
server's log knows it. The log holds no text and no picture.
"""

_DESCRIPTIONS = {
    400: "The request cannot be answered as it is; `code` and `param` say why.",
    401: "A key of this server is needed.",
    404: "No model of this name.",
    408: "The body did not come in time.",
    413: "The body or the picture has too many bytes.",
    415: "The body is not JSON.",
    421: "The server does not answer to this host name.",
    429: "As many requests wait as may wait; `Retry-After` says when to ask again.",
    500: "The engine failed at this request.",
    503: "Loading, restarting, draining or out of memory; `Retry-After` says when to ask again.",
    504: "The answer took longer than requests may.",
}
_RETRY_AFTER = {"Retry-After": {"description": "Whole seconds.", "schema": {"type": "integer", "minimum": 1}}}
PLAIN_TEXT: dict[int | str, dict[str, Any]] = {
    200: {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}
CHAT_BODY = {
    "required": True,
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ChatRequest"}, "example": EXAMPLE}},
}
_EVENT = {
    "type": "object",
    "description": "One event: a `chat.completion.chunk`, an error, or `[DONE]`.",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
CHAT_REPLY = {
    "description": "The answer; a stream of events where `stream` is true.",
    "content": {"text/event-stream": {"schema": _EVENT}},
    "headers": {
        IGNORED_TURNS: {"description": "Messages of which something was not shown.", "schema": {"type": "integer"}}
    },
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Responses of these statuses, for a route."""
    return {
        status: {
            "model": ErrorReply,
            "description": _DESCRIPTIONS[status],
            **({"headers": _RETRY_AFTER} if status in (429, 503) else {}),
        }
        for status in (*statuses, 421)
    }


def document(app: FastAPI, *, needs_key: bool) -> None:
    """Give the application its schema, made once."""

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(
                get_openapi(
                    title=app.title,
                    version=app.version,
                    summary=app.summary,
                    description=app.description,
                    routes=app.routes,
                ),
                needs_key=needs_key,
            )
        return app.openapi_schema

    app.openapi = schema  # type: ignore[method-assign]


def _complete(schema: dict[str, Any], *, needs_key: bool) -> dict[str, Any]:
    """Add the body that is read by hand, and keys; take out what FastAPI says of its own form of errors."""
    components = schema["components"]["schemas"]
    request = ChatRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    components |= {**request.pop("$defs"), "ChatRequest": request}
    for name in ("HTTPValidationError", "ValidationError"):
        components.pop(name, None)
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if path.startswith("/v1/") and needs_key:
                operation["security"] = [{"key": []}]
    if needs_key:
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return schema
