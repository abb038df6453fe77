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
    ("raised", "status", "code", "headers"),
    [
        (BusyError("Full", retry_after_s=1.2), 429, "busy", {"retry-after": "2"}),
        (UnavailableError("Loading", retry_after_s=59.01), 503, "unavailable", {"retry-after": "60"}),
        (UnavailableError("Closed"), 503, "unavailable", {"retry-after": "1"}),
        (PromptTooLongError(600, 512), 400, "context_length_exceeded", {}),
        (PromptError("Bad", hint="do well"), 400, "invalid_value", {}),
        (ValueError("Bad"), 400, "invalid_value", {}),
    ],
)
def test_a_refused_request_has_a_status_and_a_code(
    raised: Exception, status: int, code: str, headers: dict[str, str]
) -> None:
    problem = of_refusal(raised)

    assert (problem.http_status, problem.code, problem.headers) == (status, code, headers)
    assert rule_for(raised).http_status == status


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (PromptError("It is bad", hint="do well"), "It is bad: do well."),
        (GrammarError("It is bad", hint="it quotes the request"), "It is bad."),
        (ValueError("It is bad."), "It is bad."),
        # Without hints about the settings of the server:
        (PromptTooLongError(600, 512), "The prompt has 600 tokens, the context holds 512: shorten the prompt."),
        (UsageError("It takes no pictures", hint="load another"), "It takes no pictures."),
    ],
)
def test_sentence_and_hint_are_one_message(raised: Exception, message: str) -> None:
    assert of_refusal(raised).message == message
    with pytest.raises(KeyError):  # a bug is no refusal
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


@pytest.mark.parametrize(("status", "code"), [(404, "not_found"), (405, "method_not_allowed"), (418, "error")])
def test_statuses_of_the_framework_have_a_code(status: int, code: str) -> None:
    problem = of_status(status)

    assert (problem.http_status, problem.code) == (status, code)
