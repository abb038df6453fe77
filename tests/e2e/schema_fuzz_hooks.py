"""For schemathesis, which loads it in a process of its own: makes valid requests such that they can be answered.

A schema cannot say that a URL is a picture's, or that the last message asks about one: that is put in here.
"""

import copy
from typing import Any

import schemathesis

from llama_adapter.app.http_api.schemas import EXAMPLE_PICTURE

QUESTION = "What color is the square?"


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    """Mend what was generated as valid, and leave alone what was generated as wrong."""
    is_valid = case.meta is not None and case.meta.generation.mode.is_positive
    if is_valid and case.operation.label == "POST /v1/chat/completions" and isinstance(case.body, dict):
        case.body = mended_chat(case.body)
    elif is_valid and case.operation.label == "POST /v1/responses" and isinstance(case.body, dict):
        case.body = mended_responses(case.body)
    elif is_valid and case.operation.label == "GET /v1/models/{model}":
        case.path_parameters["model"] = "default"


def mended_chat(body: dict[str, Any]) -> dict[str, Any]:
    """The same request about a real picture, asked of the loaded model, in few tokens."""
    body = copy.deepcopy(body)
    _shorten(body["messages"])
    picture = {"type": "image_url", "image_url": {"url": EXAMPLE_PICTURE}}
    body["messages"].append({"role": "user", "content": [picture, {"type": "text", "text": QUESTION}]})
    if not body.get("stream"):
        body.pop("stream_options", None)
    limit = min(body.get("max_tokens") or 8, 8)
    body |= {name: limit for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None}
    return _mended(body, (body.get("response_format") or {}).get("json_schema"))


def mended_responses(body: dict[str, Any]) -> dict[str, Any]:
    """As `mended_chat`."""
    body = copy.deepcopy(body)
    items = body["input"] if isinstance(body["input"], list) else []
    _shorten(items)
    picture = {"type": "input_image", "image_url": EXAMPLE_PICTURE}
    items.append({"role": "user", "content": [picture, {"type": "input_text", "text": QUESTION}]})
    body["input"] = items
    if body.get("instructions"):
        body["instructions"] = "Answer."
    if body.get("max_output_tokens") is not None:
        body["max_output_tokens"] = min(body["max_output_tokens"], 8)
    wanted = (body.get("text") or {}).get("format") or {}
    return _mended(body, wanted if wanted.get("type") == "json_schema" else None)


def _mended(body: dict[str, Any], wanted: dict[str, Any] | None) -> dict[str, Any]:
    body["model"] = "default"
    if body.get("answer_choices"):
        body["answer_choices"] = [choice[:8] for choice in body["answer_choices"]]
        if len(set(body["answer_choices"])) < len(body["answer_choices"]):
            del body["answer_choices"]
    if wanted is not None:  # a schema cannot say which schemas can be answered
        wanted["schema"] = {"type": "object", "properties": {"red": {"type": "boolean"}}, "required": ["red"]}
        body.pop("answer_choices", None)
    return body


def _shorten(messages: list[dict[str, Any]]) -> None:
    """System texts are shown to the model: they have to fit into its context."""
    for message in messages:
        if message["role"] in ("system", "developer"):
            message["content"] = "Answer."
