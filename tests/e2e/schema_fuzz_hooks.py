"""Hooks for schemathesis, loaded in its process. They change valid requests so that the server can answer them.

A schema cannot say that a URL is a picture's, or that the last message asks about a picture. The hooks ensure both.
"""

import copy
from typing import Any

import schemathesis

from tests.app.serving.http_api.requests import EXAMPLE_PICTURE

QUESTION = "What color is the square?"


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    """Change requests that were generated as valid, and keep those that were generated as invalid."""
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    mended = {
        "POST /v1/chat/completions": mended_chat,
        "POST /v1/responses": mended_responses,
        "POST /v1/completions": mended_completions,
    }.get(case.operation.label)
    if mended is not None and isinstance(case.body, dict):
        case.body = mended(copy.deepcopy(case.body))
    elif case.operation.label == "GET /v1/models/{model}":
        case.path_parameters["model"] = "default"


def mended_chat(body: dict[str, Any]) -> dict[str, Any]:
    """The same request, changed to ask the loaded model about a real picture with a short answer."""
    _shorten(body["messages"])
    picture = {"type": "image_url", "image_url": {"url": EXAMPLE_PICTURE}}
    body["messages"].append({"role": "user", "content": [picture, {"type": "text", "text": QUESTION}]})
    if not body.get("stream"):
        body.pop("stream_options", None)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    limit = min(body.get("max_tokens") or 8, 8)
    body |= {name: limit for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None}
    return _mended(body, (body.get("response_format") or {}).get("json_schema"))


def mended_responses(body: dict[str, Any]) -> dict[str, Any]:
    """Like `mended_chat`, for a responses request."""
    items = body["input"] if isinstance(body["input"], list) else []
    _shorten(items)
    picture = {"type": "input_image", "image_url": EXAMPLE_PICTURE}
    items.append({"role": "user", "content": [picture, {"type": "input_text", "text": QUESTION}]})
    body["input"] = items
    if body.get("instructions"):
        body["instructions"] = "Answer."
    if body.get("max_output_tokens") is not None:
        body["max_output_tokens"] = min(body["max_output_tokens"], 8)
    if "message.output_text.logprobs" not in (body.get("include") or ()):
        body.pop("top_logprobs", None)
    wanted = (body.get("text") or {}).get("format") or {}
    return _mended(body, wanted if wanted.get("type") == "json_schema" else None)


def mended_completions(body: dict[str, Any]) -> dict[str, Any]:
    """Like `mended_chat`, for a completions request."""
    body["prompt"] = [QUESTION, QUESTION] if isinstance(body["prompt"], list) else QUESTION
    if body.get("image_url"):
        body["image_url"] = EXAMPLE_PICTURE
    if not body.get("stream"):
        body.pop("stream_options", None)
    return _mended(body | {"max_tokens": min(body.get("max_tokens") or 8, 8)}, None)


def _mended(body: dict[str, Any], wanted: dict[str, Any] | None) -> dict[str, Any]:
    body["model"] = "default"
    if body.get("answer_choices"):
        body["answer_choices"] = [choice[:8] for choice in body["answer_choices"]]
        different = {choice for choice in body["answer_choices"] if choice.strip()}
        if len(different) < len(body["answer_choices"]):
            del body["answer_choices"]
    # A schema cannot say which schemas and expressions can be answered, or that there is only one form of the answer.
    names = ("guided_json", "guided_regex", "structured_outputs", "json_schema")
    forms = [name for name in names if body.pop(name, None) is not None]
    named = (body.get("response_format"), (body.get("text") or {}).get("format"))
    has_format = any(one and one.get("type") != "text" for one in named)
    if forms and not has_format:
        body["guided_regex"] = "red|blue"
    if forms or has_format:
        body.pop("answer_choices", None)
    if wanted is not None:
        wanted["schema"] = {"type": "object", "properties": {"red": {"type": "boolean"}}, "required": ["red"]}
        body.pop("answer_choices", None)
    return body


def _shorten(messages: list[dict[str, Any]]) -> None:
    """Shorten system texts: the model reads them, so they must fit into its context."""
    for message in messages:
        if message.get("role") in ("system", "developer"):
            message["content"] = "Answer."
