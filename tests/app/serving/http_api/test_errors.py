"""Every error has a status and OpenAI's envelope."""

import json

import pytest

from llama_adapter.app.captioning.tasks.answers import NOT_FINITE
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.serving.http_api.errors import ApiError, of_answer, of_refusal, of_status
from llama_adapter.app.serving.online.types import BusyError, UnavailableError
from llama_adapter.llm.errors import GrammarError, PromptError, PromptTooLongError
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.problems import rule_for
from llama_adapter.vision.errors import PICTURE_ERROR_CODES


def error(code: str) -> AnswerError:
    return AnswerError(code=code, message="Told.")


@pytest.mark.parametrize(
    ("failure", "status", "param", "headers"),
    [
        *[(error(code), 400, "messages", {}) for code in PICTURE_ERROR_CODES],
        (error("deadline"), 504, None, {"x-should-retry": "false"}),
        (error("cancelled"), 503, None, {"retry-after": "1"}),
        (error("out_of_memory"), 503, None, {"retry-after": "1"}),
        (error("replica_lost"), 503, None, {"retry-after": "1"}),
        (error("engine_failed"), 500, None, {}),
        (NOT_FINITE, 500, None, {}),
        (error("unknown_code"), 500, None, {}),
    ],
)
def test_a_failed_answer_has_the_status_of_its_code(
    failure: AnswerError, status: int, param: str | None, headers: dict[str, str]
) -> None:
    problem = of_answer(failure)

    assert (problem.http_status, problem.code, problem.param) == (status, failure.code, param)
    assert problem.headers == headers


@pytest.mark.parametrize(
    ("raised", "status", "code", "headers", "message"),
    [
        (BusyError("It is full", retry_after_s=1.2), 429, "busy", {"retry-after": "2"}, "It is full."),
        (UnavailableError("Loading", retry_after_s=59.01), 503, "unavailable", {"retry-after": "60"}, "Loading."),
        (UnavailableError("Closed"), 503, "unavailable", {"retry-after": "1"}, "Closed."),
        (PromptError("It is bad", hint="do well"), 400, "invalid_value", {}, "It is bad: do well."),
        (ValueError("It is bad."), 400, "invalid_value", {}, "It is bad."),
        (PromptError("It is bad", hint="name another --prompt-template"), 400, "invalid_value", {}, "It is bad."),
        (GrammarError("It is bad", hint="it quotes the request"), 400, "invalid_value", {}, "It is bad."),
        # Without hints about the settings of the server:
        (UsageError("It is blind", hint="load another"), 400, "invalid_value", {}, "It is blind."),
        (
            *(PromptTooLongError(600, 512), 400, "context_length_exceeded", {}),
            "The prompt has 600 tokens, the context holds 512: shorten the prompt.",
        ),
    ],
)
def test_a_refused_request_has_a_status_a_code_and_one_message(
    raised: Exception, status: int, code: str, headers: dict[str, str], message: str
) -> None:
    problem = of_refusal(raised)

    assert (problem.http_status, problem.code, problem.headers, problem.message) == (status, code, headers, message)
    assert rule_for(raised).http_status == status


def test_a_bug_is_no_refusal() -> None:
    with pytest.raises(KeyError):
        of_refusal(KeyError("a"))


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "invalid_request_error"),
        (429, "rate_limit_error"),
        (503, "server_error"),
    ],
)
def test_the_envelope_is_that_of_openai(status: int, kind: str) -> None:
    response = ApiError("Told.", status=status, code="c", param="p", headers={"a": "b"}).response()

    assert (response.status_code, response.headers["a"]) == (status, "b")
    assert json.loads(response.body) == {"error": {"message": "Told.", "type": kind, "param": "p", "code": "c"}}
    assert (of_status(418).http_status, of_status(418).code) == (418, "error")
