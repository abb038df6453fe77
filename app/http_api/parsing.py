"""The body of a request -> a checked `ChatRequest`, or an error that names the part it is about and quotes nothing."""

import asyncio
import re
from collections.abc import Sequence

import pydantic_core
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from llama_adapter.app.http_api.problems import ApiError
from llama_adapter.app.http_api.schemas import LABEL_MARK, NEUTRAL_VALUES, ChatRequest, NeutralParameters

MAX_SEPARATORS = 50_000
_SEPARATORS = (b",", b"[", b"{")
_INLINE_BYTES = 64 * 2**10  # parsed at once: handing it to a thread would take as long
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_ROLE_TAG, _PART_TAG = 2, 5  # where the places of errors have the kind of a message, and of a part


async def parse_chat_request(body: bytearray) -> ChatRequest:
    """Check a body; a large one in a thread. Raises ApiError."""
    if len(body) <= _INLINE_BYTES:
        return _parse(body)
    return await asyncio.to_thread(_parse, body)


def _parse(body: bytearray) -> ChatRequest:
    # Three bytes of JSON can stand for a hundred of memory, so things are counted before any is made.
    if sum(map(body.count, _SEPARATORS)) > MAX_SEPARATORS:
        raise ApiError(
            f"The request has more than {MAX_SEPARATORS:,} commas and opening brackets: send fewer messages.",
            code="request_too_complex",
        )
    try:
        content = pydantic_core.from_json(body, allow_inf_nan=False, cache_strings=False)
    except ValueError:
        raise ApiError("The body is not valid JSON in UTF-8.", code="invalid_json") from None
    if not isinstance(content, dict):
        raise ApiError("The body must be a JSON object with `model` and `messages`.", code="invalid_type")
    try:
        return ChatRequest.model_validate(content)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
    raise _explain(details[0])


def _explain(detail: ErrorDetails) -> ApiError:
    """The error in a sentence. Only what stands in our own models is said, and names of parameters."""
    kind, place = detail["type"], _place(detail["loc"])
    top = place.split(".")[0].split("[")[0]
    if kind == "extra_forbidden":
        return _unknown(detail["loc"])
    if top in NeutralParameters.model_fields:
        neutral = NEUTRAL_VALUES.get(top, "null")
        return ApiError(
            f"`{top}` is not supported by this server: leave it out, or send {neutral}.",
            code="unsupported_parameter",
            param=top,
        )
    if kind == "missing":
        return ApiError(f"`{place}` is missing.", code="missing_required_parameter", param=place)
    return ApiError(f"`{place}`: {_wanted(detail)}.", code="invalid_value", param=place)


def _unknown(location: Sequence[str | int]) -> ApiError:
    """The error of a parameter nobody knows; its name is said only where it looks like one."""
    name = str(location[-1])
    parent = _place(location[:-1])
    if not _NAME.fullmatch(name):
        within = f" of `{parent}`" if parent else ""
        return ApiError(f"A parameter{within} has a name unknown to this server.", code="unknown_parameter")
    param = f"{parent}.{name}" if parent else name
    return ApiError(f"`{param}` is unknown to this server: leave it out.", code="unknown_parameter", param=param)


def _wanted(detail: ErrorDetails) -> str:
    match detail["type"]:
        case "union_tag_invalid" | "union_tag_not_found" if len(detail["loc"]) <= _ROLE_TAG:
            return "a message has the role system, developer, user or assistant"
        case "union_tag_invalid" | "union_tag_not_found":
            return "a part has the type text or image_url"
        case "model_attributes_type" | "model_type":
            return "must be an object"
        case "list_type" if detail["loc"][-1] == f"{LABEL_MARK}list":
            return "must be a text or a list"
    message = detail["msg"]
    return f"{message[0].lower()}{message[1:]}".replace(" after validation", "")


def _place(location: Sequence[str | int]) -> str:
    """Where an error is, as people write it: messages[0].content[1].image_url.url."""
    names = list(location)
    if names[:1] == ["messages"] and len(names) > _ROLE_TAG:
        role = names[_ROLE_TAG]
        if role == "user" and len(names) > _PART_TAG + 1:
            del names[_PART_TAG + 1]
        del names[_ROLE_TAG]
    shown = ""
    for name in names:
        if isinstance(name, int):
            shown += f"[{name}]"
        elif not name.startswith(LABEL_MARK):
            shown += f".{name}" if shown else name
    return shown
