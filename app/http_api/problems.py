"""Errors as HTTP tells them: one envelope, as OpenAI's, and what each kind of error means. Knows no framework.

No text of a request is ever part of a message.
"""

import json
import math
from collections.abc import Mapping

from llama_adapter.app.http_api.picture_errors import PictureRefusedError
from llama_adapter.app.online.reading_pool import READING_BUSY, READING_FAILED
from llama_adapter.app.online.types import BusyError, ServiceError
from llama_adapter.app.reading.reader import CRASHED, TIMEOUT
from llama_adapter.app.tasks.answers import AnswerError
from llama_adapter.llm.errors import PromptError, PromptTooLongError
from llama_adapter.runtime.errors import LlamaAdapterError
from llama_adapter.runtime.problems import describe
from llama_adapter.vision.errors import PICTURE_ERROR_CODES

CLIENT_GONE = 499  # never sent: what the log says of a request whose client has hung up
_SHORTEST_WAIT_S = 1
_TYPES: Mapping[int, str] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES: Mapping[int, str] = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
}
_MESSAGES: Mapping[int, str] = {
    404: "There is nothing at this path. The paths are listed at /docs.",
    405: "This path does not answer to this method. The paths and methods are listed at /docs.",
}
_ANSWER_STATUS: Mapping[str, int] = {
    **dict.fromkeys((*PICTURE_ERROR_CODES, TIMEOUT, CRASHED), 400),
    READING_BUSY: 503,
    READING_FAILED: 503,
    "deadline": 504,
    "cancelled": 503,  # of a client that is still there: the service is being closed
    "engine_failed": 500,
    "out_of_memory": 503,
    "not_finite": 500,
}


_ANSWER_HEADERS: Mapping[int, Mapping[str, str]] = {
    503: {"retry-after": str(_SHORTEST_WAIT_S)},
    # Else OpenAI's clients ask twice more at once, of a server that has too much to do already.
    504: {"x-should-retry": "false"},
}


class ApiError(LlamaAdapterError):
    """An answer with an error status; `param` names the part of the request that is meant."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.http_status, self.code, self.param = status, code, param
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The envelope as JSON."""
        error = {"message": self.message, "type": error_type(self.http_status), "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


def error_type(status: int) -> str:
    """OpenAI's type of errors of a status."""
    return _TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")


def of_status(status: int) -> ApiError:
    """The error of a status that the framework came to by itself, such as 404."""
    message = _MESSAGES.get(status, "The request cannot be answered as it is.")
    return ApiError(message, status=status, code=_CODES.get(status, "error"))


def internal_error() -> ApiError:
    """The error that hides what went wrong: the log has it."""
    return ApiError("The server failed at this request; its log says more.", status=500, code="internal_error")


def of_answer(error: AnswerError) -> ApiError:
    """The error of a request that was taken and has no answer."""
    status = _ANSWER_STATUS.get(error.code, 500)
    return ApiError(
        error.message,
        status=status,
        code=error.code,
        param="messages" if status == 400 else None,
        headers=_ANSWER_HEADERS.get(status),
    )


def of_refusal(error: Exception) -> ApiError:
    """The error of a request that was not taken: what `Service.submit` and `read_picture` raise."""
    match error:
        case ServiceError():
            return _of_service(error)
        case PictureRefusedError():
            return ApiError(error.message, status=error.http_status, code=error.code, param="messages")
        case PromptTooLongError():
            return ApiError(_sentence(error), code="context_length_exceeded", param="messages")
        case PromptError() | ValueError():
            return ApiError(_sentence(error), code="invalid_value")
    raise error


def retry_after(seconds: float | None) -> str:
    """The value of a Retry-After header: whole seconds, at least one."""
    return str(max(_SHORTEST_WAIT_S, math.ceil(seconds or 0.0)))


def _of_service(error: ServiceError) -> ApiError:
    status, code = (429, "busy") if isinstance(error, BusyError) else (503, "unavailable")
    return ApiError(
        _sentence(error), status=status, code=code, headers={"retry-after": retry_after(error.retry_after_s)}
    )


def _sentence(error: Exception) -> str:
    problem = describe(error)
    return ": ".join(filter(None, (problem.sentence.rstrip("."), problem.hint.rstrip(".")))) + "."
