"""For schemathesis, which loads it in a process of its own: makes valid requests such that they can be answered.

A schema cannot say that a URL is a picture's, or that the last message asks about one: that is put in here.
"""

import copy
from typing import Any

import schemathesis

from llama_adapter.app.http_api.schemas import EXAMPLE_PICTURE


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    """Mend what was generated as valid, and leave alone what was generated as wrong."""
    is_valid = case.meta is not None and case.meta.generation.mode.is_positive
    if is_valid and case.operation.label == "POST /v1/chat/completions" and isinstance(case.body, dict):
        case.body = mended(case.body)
    elif is_valid and case.operation.label == "GET /v1/models/{model}":
        case.path_parameters["model"] = "default"


def mended(body: dict[str, Any]) -> dict[str, Any]:
    """The same request about a real picture, asked of the loaded model, in few tokens."""
    body = copy.deepcopy(body)
    body["model"] = "default"
    for message in body["messages"]:
        _shorten(message)
    picture = {"type": "image_url", "image_url": {"url": EXAMPLE_PICTURE}}
    question = {"type": "text", "text": "What color is the square?"}
    body["messages"].append({"role": "user", "content": [picture, question]})
    if not body.get("stream"):
        body.pop("stream_options", None)
    limit = min(body.get("max_tokens") or 8, 8)
    body |= {name: limit for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None}
    if body.get("answer_choices"):
        body["answer_choices"] = [choice[:8] for choice in body["answer_choices"]]
        if len(set(body["answer_choices"])) < len(body["answer_choices"]):
            del body["answer_choices"]
    return body


def _shorten(message: dict[str, Any]) -> None:
    """System texts are shown to the model: they have to fit into its context."""
    if message["role"] in ("system", "developer"):
        message["content"] = "Answer."
