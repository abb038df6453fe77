"""`/v1/completions`: prompts, the answer, and what is refused."""

from typing import Any

import httpx
import pytest

from llama_adapter.app.captioning.tasks.prompts import RawPrompt
from llama_adapter.app.serving.http_api.completions import CompletionReply
from llama_adapter.app.serving.http_api.schemas import CompletionRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from tests.app.serving.http_api.live import INFO, StubService, answer, check_documented, client_of, error
from tests.app.serving.http_api.requests import EXAMPLE_PICTURE

COMPLETIONS = "/v1/completions"


def wanted(prompt: Any = "The star is", **parameters: Any) -> dict[str, Any]:
    return {"model": "default", "prompt": prompt, **parameters}


def sent(client: httpx.Client, **parameters: Any) -> tuple[int, dict[str, Any]]:
    came = client.post(COMPLETIONS, json=wanted(**parameters))
    return came.status_code, came.json()


def test_a_text_is_continued_without_a_template(client: httpx.Client, service: StubService) -> None:
    code, body = sent(client)

    (ask,) = service.asks
    assert (ask.prompt, ask.picture, ask.num_logprobs) == (RawPrompt("The star is"), None, None)
    assert ask.sampling == SamplingParams(max_new_tokens=16)
    assert (code, body["choices"][0]["text"]) == (200, "red")
    check_documented(body, "Completion")


def test_each_prompt_has_its_answers_and_seeds(service: StubService, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="llama_adapter")
    service.on_submit = lambda handle: handle.deliver(answer(f"answer {handle.id}", prompt_tokens=3 + handle.id // 2))
    with client_of(service) as client:  # when this ends, the line is in the log
        code, body = sent(client, prompt=["one", "two"], n=2, seed=7, temperature=0.5, stop="x", max_tokens=4)

    assert code == 200
    first, second = (SamplingParams(max_new_tokens=4, temperature=0.5, seed=seed) for seed in (7, 8))
    assert [(ask.prompt, ask.sampling) for ask in service.asks] == [
        (RawPrompt("one"), first),
        (RawPrompt("one"), second),
        (RawPrompt("two"), first),
        (RawPrompt("two"), second),
    ]
    assert all(ask.stop == ("x",) for ask in service.asks)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (number, f"answer {number}") for number in range(4)
    ]
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 8, "total_tokens": 15}
    assert "7+8 tokens" in caplog.messages[-1]


def test_a_picture_may_come_with_the_prompt(client: httpx.Client, service: StubService) -> None:
    assert sent(client, image_url=EXAMPLE_PICTURE)[0] == 200
    assert service.asks[0].picture is not None


@pytest.mark.parametrize("logprobs", [None, 0, 5])
def test_log_probabilities_are_a_number(logprobs: int | None) -> None:
    asked = CompletionReply.understand(CompletionRequest.model_validate(wanted(logprobs=logprobs)), INFO)
    assert asked.num_logprobs == logprobs


@pytest.mark.parametrize(
    ("parameters", "code", "param"),
    [
        ({"echo": True}, "unsupported_parameter", "echo"),
        ({"suffix": "."}, "unsupported_parameter", "suffix"),
        ({"top_logprobs": 2}, "unknown_parameter", "top_logprobs"),
        ({"response_format": {"type": "grammar"}}, "unsupported_parameter", "response_format"),
        ({"response_format": {"type": "json_schema"}}, "missing_required_parameter", "response_format.json_schema"),
        ({"logprobs": 6}, "invalid_value", "logprobs"),
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"prompt": []}, "invalid_value", "prompt"),
        ({"prompt": [1, 2]}, "invalid_value", "prompt[0]"),
        ({"prompt": None}, "missing_required_parameter", "prompt"),
        ({"prompt": ["a"] * 16, "n": 3}, "invalid_value", "prompt"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ({"messages": []}, "unknown_parameter", "messages"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    client: httpx.Client, parameters: dict[str, Any], code: str, param: str
) -> None:
    assert error(client.post(COMPLETIONS, json=wanted(**parameters))) == (400, code, param)


def test_neutral_values_pass(client: httpx.Client) -> None:
    assert sent(client, echo=False, best_of=1, suffix=None, user="u", logit_bias={})[0] == 200
