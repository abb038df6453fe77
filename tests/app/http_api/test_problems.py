"""Every error has a status and OpenAI's envelope."""

import json

import pytest

from llama_adapter.app.http_api.picture_errors import PictureRefusedError
from llama_adapter.app.http_api.problems import ApiError, of_answer, of_refusal, of_status, retry_after
from llama_adapter.app.online.types import BusyError, UnavailableError
from llama_adapter.app.tasks.answers import NOT_FINITE, AnswerError
from llama_adapter.llm.errors import PromptError, PromptTooLongError
from llama_adapter.runtime.problems import rule_for
from llama_adapter.vision.errors import PICTURE_ERROR_CODES


def error(code: str) -> AnswerError:
    return AnswerError(code=code, message="Told.")


@pytest.mark.parametrize("code", PICTURE_ERROR_CODES)
def test_a_picture_that_cannot_be_read_is_the_request_s_fault(code: str) -> None:
    problem = of_answer(error(code))

    assert (problem.http_status, problem.code, problem.param) == (400, code, "messages")


@pytest.mark.parametrize(
    ("told", "status"),
    [
        (error("deadline"), 504),
        (error("engine_failed"), 500),
        (NOT_FINITE, 500),
        (error("cancelled"), 503),
        (error("out_of_memory"), 503),
    ],
)
def test_an_answer_that_failed_is_not_the_request_s_fault(told: AnswerError, status: int) -> None:
    problem = of_answer(told)

    assert (problem.http_status, problem.code, problem.param) == (status, told.code, None)
    assert problem.headers == {503: {"retry-after": "1"}, 504: {"x-should-retry": "false"}}.get(status, {})


def test_a_code_that_nobody_knows_is_the_server_s_fault() -> None:
    assert of_answer(error("new")).http_status == 500


@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [
        (BusyError("Full", retry_after_s=1.2), 429, "busy"),
        (UnavailableError("Loading", retry_after_s=1.2), 503, "unavailable"),
        (PictureRefusedError("No.", code="image_file_too_large", status=413), 413, "image_file_too_large"),
        (PromptTooLongError(600, 512), 400, "context_length_exceeded"),
        (PromptError("Bad", hint="do well"), 400, "invalid_value"),
        (ValueError("Bad"), 400, "invalid_value"),
    ],
)
def test_a_request_that_is_not_taken_has_a_status_and_a_code(raised: Exception, status: int, code: str) -> None:
    problem = of_refusal(raised)

    assert (problem.http_status, problem.code) == (status, code)
    assert problem.headers == ({"retry-after": "2"} if status in (429, 503) else {})


def test_an_error_of_the_program_is_not_taken_for_one_of_the_request() -> None:
    with pytest.raises(KeyError):
        of_refusal(KeyError("a"))


def test_statuses_agree_with_the_table_of_errors() -> None:
    for raised in (PromptTooLongError(600, 512), PromptError("Bad"), ValueError("Bad")):
        assert of_refusal(raised).http_status == rule_for(raised).http_status


@pytest.mark.parametrize(("seconds", "value"), [(None, "1"), (0.0, "1"), (0.2, "1"), (1.0, "1"), (59.01, "60")])
def test_waiting_is_told_in_whole_seconds_of_at_least_one(seconds: float | None, value: str) -> None:
    assert retry_after(seconds) == value


def test_the_sentence_and_what_to_do_are_one_message() -> None:
    assert of_refusal(PromptError("It is bad", hint="do well")).message == "It is bad: do well."
    assert of_refusal(ValueError("It is bad.")).message == "It is bad."


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
    body = json.loads(ApiError("Told.", status=status, code="c", param="p").body())

    assert body == {"error": {"message": "Told.", "type": kind, "param": "p", "code": "c"}}


@pytest.mark.parametrize("status", [404, 405, 413, 415, 418])
def test_statuses_of_the_framework_have_words_too(status: int) -> None:
    assert of_status(status).message
