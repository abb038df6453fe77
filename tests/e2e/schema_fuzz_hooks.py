"""Hooks for schemathesis, loaded in its process. They change valid requests so that the server can answer them.

A schema cannot say that a URL is a picture's, that the last message asks about a picture, which schemas and expressions
can be answered, or that there is only one form of the answer. The hooks ensure these.
"""

import copy
from typing import Any

import schemathesis

from tests.app.serving.http_api.requests import EXAMPLE_PICTURE, image, user

QUESTION = "What color is the square?"
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
FORMS = ("guided_json", "guided_regex", "structured_outputs", "json_schema")
SCHEMA = {"type": "object", "properties": {"red": {"type": "boolean"}}, "required": ["red"]}


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    """Change requests that were generated as valid, and keep those that were generated as invalid."""
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    kind = case.operation.label.removeprefix("POST /v1/")
    if kind in ("chat/completions", "responses", "completions") and isinstance(case.body, dict):
        case.body = mended(copy.deepcopy(case.body), kind)
    elif case.operation.label == "GET /v1/models/{model}":
        case.path_parameters["model"] = "default"


def mended(body: dict[str, Any], kind: str) -> dict[str, Any]:
    """The same request, changed to ask the loaded model about a real picture with a short answer."""
    body["model"] = "default"
    if kind == "completions":
        body["prompt"] = [QUESTION, QUESTION] if isinstance(body["prompt"], list) else QUESTION
        body["max_tokens"] = body.get("max_tokens") or 8
        if body.get("image_url"):
            body["image_url"] = EXAMPLE_PICTURE
    else:
        place = "messages" if kind == "chat/completions" else "input"
        turns = body[place] if isinstance(body[place], list) else []
        for turn in turns:
            if turn.get("role") in ("system", "developer"):
                turn["content"] = "Answer."  # the model reads it, so it must fit into the context
        body[place] = [*turns, user(image(), QUESTION)]
    if body.get("instructions"):
        body["instructions"] = "Answer."
    if not body.get("stream"):
        body.pop("stream_options", None)
    if not body.get("logprobs") and "message.output_text.logprobs" not in (body.get("include") or ()):
        body.pop("top_logprobs", None)
    given = [name for name in LIMITS if body.get(name) is not None]
    body |= dict.fromkeys(given, min([8, *(body[name] for name in given)]))
    if body.get("answer_choices"):
        body["answer_choices"] = [choice[:8] for choice in body["answer_choices"]]
        if len({choice for choice in body["answer_choices"] if choice.strip()}) < len(body["answer_choices"]):
            del body["answer_choices"]
    forms = [name for name in FORMS if body.pop(name, None) is not None]
    wanted = body.get("response_format") or (body.get("text") or {}).get("format") or {}
    has_format = wanted.get("type", "text") != "text"
    if forms and not has_format:
        body["guided_regex"] = "red|blue"
    if forms or has_format:
        body.pop("answer_choices", None)
    if wanted.get("type") == "json_schema":
        wanted.get("json_schema", wanted)["schema"] = SCHEMA
    return body
