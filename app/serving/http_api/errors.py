"""Errors as HTTP answers: OpenAI's envelope, status and code for each kind of error, and handlers for FastAPI.

No message quotes text of a request.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from llama_adapter.app.captioning.tasks.answers import TOO_COMPLEX
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.reading.reader import CRASHED, TIMEOUT
from llama_adapter.app.serving.http_api.schemas import LABEL_MARK, UNSUPPORTED, UNSUPPORTED_IN_RESPONSES
from llama_adapter.app.serving.online.base import REPLICA_LOST
from llama_adapter.app.serving.online.reading_pool import READING_BUSY, READING_FAILED
from llama_adapter.app.serving.online.types import BusyError, ServiceError
from llama_adapter.llm.errors import GrammarError, PromptError, PromptTooLongError
from llama_adapter.runtime.errors import LlamaAdapterError, UsageError
from llama_adapter.runtime.problems import describe
from llama_adapter.vision.errors import PICTURE_ERROR_CODES

ERROR_CODE = "x-error-code"  # the header that repeats an error's code, for the logs of proxies and of this server
CLIENT_GONE = 499  # logged for a client that has hung up; never sent
# Code -> status of requests that a replica refuses after the service accepted them. `of_refusal` gives the same codes.
REFUSED: Mapping[str, int] = {"context_length_exceeded": 400, "invalid_value": 400, "busy": 429, "unavailable": 503}

_TYPES: Mapping[int, str] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_FRAMEWORK_ERRORS: Mapping[int, tuple[str, str]] = {
    404: (
        "not_found",
        "Nothing is served at this path. The API has /v1/chat/completions, /v1/completions, /v1/responses and "
        "/v1/models: the base URL of a client is the address of this server followed by /v1. /docs lists all paths.",
    ),
    405: ("method_not_allowed", "This path does not accept this method. /docs lists all paths and methods."),
}
_ANSWER_STATUS: Mapping[str, int] = {
    **REFUSED,
    **dict.fromkeys((*PICTURE_ERROR_CODES, TIMEOUT, CRASHED, TOO_COMPLEX.code), 400),
    **dict.fromkeys((READING_BUSY, READING_FAILED, REPLICA_LOST, "out_of_memory"), 503),
    "cancelled": 503,  # the client is still connected, so the service is closing
    "deadline": 504,
}
_ANSWER_HEADERS: Mapping[int, Mapping[str, str]] = {
    429: {"retry-after": "1"},
    503: {"retry-after": "1"},
    504: {"x-should-retry": "false"},  # OpenAI's clients would otherwise retry twice at once
}
PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")  # matches what looks like the name of a parameter
_OF_OTHER_VALUES = ("none_required", "union_tag_invalid", "literal_error")  # kinds of errors
_UNSUPPORTED = {*UNSUPPORTED, *UNSUPPORTED_IN_RESPONSES, "response_format", "text", "tool_choice", "suffix"}


class ApiError(LlamaAdapterError):
    """An answer with an error status; `param` names the part of the request that is wrong."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_value",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.http_status, self.code, self.param = status, code, param
        self.headers = dict(headers or {})

    def envelope(self) -> dict[str, Any]:
        """The JSON body, in OpenAI's form."""
        kind = _TYPES.get(self.http_status) or ("server_error" if self.http_status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP answer."""
        headers = {**self.headers, ERROR_CODE: self.code}
        return JSONResponse(self.envelope(), status_code=self.http_status, headers=headers)


def not_stored() -> ApiError:
    """The refusal of a request for an earlier response."""
    message = "This server stores no responses: send the conversation again as `input`, without `previous_response_id`."
    return ApiError(message, status=404, code="response_not_found")


class PictureRefusedError(ApiError):
    """A request's picture is refused before it is decoded. Decoding errors are in `vision.errors`."""

    def __init__(self, message: str, *, code: str, status: int = 400) -> None:
        super().__init__(message, status=status, code=code, param="messages")


def of_status(status: int, *, headers: Mapping[str, str] | None = None) -> ApiError:
    """The error for a status that the framework chose, such as 404."""
    code, message = _FRAMEWORK_ERRORS.get(status, ("error", "The request cannot be processed."))
    return ApiError(message, status=status, code=code, headers=headers)


def of_answer(error: AnswerError, *, place: str = "messages") -> ApiError:
    """The error for a request that was accepted and failed; `place` names the field with the picture."""
    status = _ANSWER_STATUS.get(error.code, 500)
    param = place if status == 400 and error.code not in ("invalid_value", TOO_COMPLEX.code) else None
    return ApiError(error.message, status=status, code=error.code, param=param, headers=_ANSWER_HEADERS.get(status))


def of_refusal(error: Exception) -> ApiError:
    """The error for a request that `Service.submit` refused with `error`; other exceptions are raised again.

    Hints about the server's own settings are left out: clients cannot follow them.
    """
    problem = describe(error)
    hint = "" if "--" in problem.hint else problem.hint.rstrip(".")
    message = ": ".join(filter(None, (problem.sentence.rstrip("."), hint))) + "."
    match error:
        case ServiceError():
            code = "busy" if isinstance(error, BusyError) else "unavailable"
            headers = {"retry-after": str(max(1, math.ceil(error.retry_after_s or 0.0)))}
            return ApiError(message, status=error.http_status, code=code, headers=headers)
        case PromptTooLongError():
            message = f"{problem.sentence.rstrip('.')}: shorten the prompt."
            return ApiError(message, code="context_length_exceeded", param="messages")
        case UsageError() | GrammarError():
            return ApiError(f"{problem.sentence.rstrip('.')}.")
        case PromptError() | ValueError():
            return ApiError(message)
    raise error


def of_validation(error: RequestValidationError) -> ApiError:
    """The first error of an invalid body, or that of `tools`. The message has names of our own schema only."""
    found = error.errors()  # a tool comes with other parameters, and says best why a request is refused
    detail = next((one for one in found if one["loc"][1:2] == ("tools",)), found[0])
    # After "body", without the tag of a format, which is no name in the request.
    location = [name for before, name in pairwise(detail["loc"]) if before not in ("response_format", "format")]
    kind, place = detail["type"], _place(location)
    if isinstance(error.body, bytes):  # FastAPI parses JSON only
        return ApiError(
            "The body must be JSON: send it with `Content-Type: application/json`.",
            status=415,
            code="unsupported_media_type",
        )
    if kind == "json_invalid" or (kind == "missing" and not location):
        return ApiError("The body is not valid JSON in UTF-8.", code="invalid_json")
    if not location:
        return ApiError("The body must be a JSON object with `messages` (or `input`, `prompt`).", code="invalid_type")
    if kind == "extra_forbidden":
        return _unknown_parameter(location)
    if kind == "missing":
        return ApiError(f"`{place}` is missing.", code="missing_required_parameter", param=place)
    # Of these, other values are supported; in /v1/responses, `prompt` must be null.
    is_known = location[0] in ("prompt", "response_format", "text") and kind not in _OF_OTHER_VALUES
    if location[0] in _UNSUPPORTED and not is_known:
        message = f"This server does not support this value of `{place}`: leave the parameter out."
        if location[0] == "tools":  # some clients send a tool to get an answer in JSON
            message = (
                "This server calls no tools: ask for JSON by `response_format` or `text.format` with a JSON schema."
            )
        return ApiError(message, code="unsupported_parameter", param=str(location[0]))
    return ApiError(f"`{place}`: {_expected(detail)}.", param=place)


def add_error_handlers(app: FastAPI) -> None:
    """Answer all errors in one form, whichever layer raises them."""

    @app.exception_handler(ApiError)
    async def answer_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def answer_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        error.__traceback__ = error.__cause__ = error.__context__ = None  # a cycle that would keep the body in memory
        return of_validation(error).response()

    @app.exception_handler(HTTPException)
    async def answer_status(request: Request, error: HTTPException) -> JSONResponse:
        return of_status(error.status_code, headers=error.headers).response()


def _unknown_parameter(location: Sequence[str | int]) -> ApiError:
    """The error for an unknown parameter. It names the parameter only if the name looks like one."""
    name, parent = str(location[-1]), _place(location[:-1])
    if not PARAMETER.fullmatch(name):
        return ApiError(f"Unknown parameter{f' in `{parent}`' if parent else ''}.", code="unknown_parameter")
    param = f"{parent}.{name}" if parent else name
    return ApiError(f"Unknown parameter `{param}`.", code="unknown_parameter", param=param)


def _expected(detail: Mapping[str, Any]) -> str:
    if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):  # pydantic's message quotes the request
        return f"{detail['ctx']['discriminator']} is missing or unknown"
    message: str = detail["msg"].replace("should be None", "should be null")
    return f"{message[0].lower()}{message[1:]}".removeprefix("value error, ").replace(" after validation", "")


def _place(location: Sequence[str | int]) -> str:
    """A location in the usual notation: messages[0].content[1].image_url.url."""
    names = [name for name in location if isinstance(name, int) or not name.startswith(LABEL_MARK)]
    return "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names).removeprefix(".")
