"""OpenAI's client and the API with the embedded model: answers, streams and errors."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from llama_adapter import Captioner
from llama_adapter.app.captioning.tasks.prompts import RawPrompt
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.serving.http_api.api import ApiSettings, create_api
from llama_adapter.app.serving.http_api.guards import GuardSettings
from llama_adapter.app.serving.http_api.metrics import Metrics
from llama_adapter.app.serving.online.service import Service
from llama_adapter.app.serving.online.types import ServiceLimits
from tests.app.serving.http_api.live import served
from tests.app.serving.http_api.requests import CHAT, RED_STAR, data_uri, image, user
from tests.app.serving.online.waiting import wait_for
from tests.app.serving.server_process import ServerProcess

pytestmark = pytest.mark.slow

KEY = "a-long-enough-key"
QUESTIONS = [
    ("01-yellow-moon-green-cross.png", "What color is the moon?"),
    ("03-purple-triangle.png", ""),
    ("12-red-star.jpg", "Where is the star?"),
    ("12-red-star.jpg", "Describe this image."),
]


@pytest.fixture(scope="module")
def captioner() -> Captioner:
    return Captioner.load()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The API of a service in this process. test_replicas.py asks its own server some of these questions."""
    metrics = Metrics()
    service = Service(Captioner.load, limits=ServiceLimits(max_waiting=200), observer=metrics)
    service.start()
    service.wait_until_ready()
    settings = ApiSettings(guards=GuardSettings(api_keys=(KEY,)))
    with served(create_api(service, settings=settings, metrics=metrics)) as url:
        yield f"{url}/v1"
    service.close()


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60.0)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with client_of(url) as client:
        yield client


def about(name: str, *texts: str) -> list[Any]:
    picture = sample_pictures() / name
    return [user(image(data_uri(picture.read_bytes(), kind=picture.suffix[1:])), *texts)]


def star(*texts: str) -> list[Any]:
    return about(RED_STAR.name, *texts)


@pytest.mark.proves("serve: OpenAI's API", "CPU")
def test_a_question_is_answered_with_the_counts_of_its_tokens(client: openai.OpenAI) -> None:
    said = client.chat.completions.create(model="default", messages=star("What color is the star?"))

    (choice,) = said.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "red", "stop")
    assert said.model == "embedded"
    assert said.usage is not None
    assert said.usage.completion_tokens >= 1
    assert said.usage.total_tokens == said.usage.prompt_tokens + said.usage.completion_tokens
    assert said._request_id


def test_a_stream_gives_the_same_text_piece_by_piece(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="default", messages=star("Describe this image."))

    chunks = list(
        client.chat.completions.create(
            model="default",
            messages=star("Describe this image."),
            stream=True,
            stream_options={"include_usage": True},
        )
    )

    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(pieces) > 1
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert [chunk.choices[0].model_extra for chunk in chunks if chunk.choices][-1] == {"unfamiliar": False}
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize(
    ("over_http", "from_python"),
    [
        ({}, {}),
        ({"max_tokens": 3}, {"max_new_tokens": 3}),
        (
            {"temperature": 2.0, "top_p": 1.0, "seed": -3, "extra_body": {"top_k": 5}},
            {"temperature": 2.0, "top_p": 1.0, "seed": -3, "top_k": 5},
        ),
    ],
)
def test_answers_are_those_of_the_captioner_for_the_same_seed_and_settings(
    client: openai.OpenAI, captioner: Captioner, over_http: dict[str, Any], from_python: dict[str, Any]
) -> None:
    def ask(question: tuple[str, str]) -> tuple[str | None, str]:
        name, text = question
        choice = client.chat.completions.create(model="default", messages=about(name, text), **over_http).choices[0]
        return choice.message.content, choice.finish_reason

    with ThreadPoolExecutor(len(QUESTIONS)) as pool:  # at the same time, so that they share batches
        answers = list(pool.map(ask, QUESTIONS))

    pictures = [sample_pictures() / name for name, _ in QUESTIONS]
    prompts = [text or captioner.info.default_prompt for _, text in QUESTIONS]
    expected = captioner.generate(pictures, prompts, **from_python)
    assert answers == [(answer.text, answer.finish) for answer in expected]


class Star(BaseModel):
    color: Literal["red", "blue"] = Field(description="What color is the star?")
    is_green: bool = Field(description="Is there a green circle?")
    caption: str = Field(description="Describe this image.")


STAR = Star(color="red", is_green=False, caption="a small red star at the left")


def test_json_of_a_model_is_parsed_by_both_routes(client: openai.OpenAI) -> None:
    chat = client.chat.completions.parse(model="default", messages=star("Describe it."), response_format=Star)
    response = client.responses.parse(model="default", input=asked("Describe it."), text_format=Star)

    assert chat.choices[0].message.parsed == response.output_parsed == STAR
    probabilities = chat.choices[0].model_extra["answer_details"]["probabilities"]
    assert probabilities["is_green"]["false"] > 0.99


def test_several_answers_with_log_probabilities(client: openai.OpenAI) -> None:
    settings = {"model": "default", "messages": star("Describe this image."), "temperature": 2.0, "top_p": 1.0}
    said = client.chat.completions.create(**settings, n=3, seed=5, logprobs=True, top_logprobs=2)
    third = client.chat.completions.create(**settings, seed=7).choices[0]
    with client.chat.completions.stream(**settings, n=3, seed=5, logprobs=True, top_logprobs=2) as stream:
        streamed = stream.get_final_completion()

    assert [choice.index for choice in said.choices] == [0, 1, 2]
    assert said.choices[2].message.content == third.message.content
    for choice, other in zip(said.choices, streamed.choices, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
        assert (other.message.content, other.logprobs) == (choice.message.content, choice.logprobs)


def test_a_text_is_completed(client: openai.OpenAI, captioner: Captioner) -> None:
    (expected,) = captioner.generate_text(RawPrompt("What is a star?"), max_new_tokens=16)
    said = client.completions.create(model="default", prompt="What is a star?", logprobs=3)
    pieces = list(client.completions.create(model="default", prompt="What is a star?", stream=True))

    (choice,) = said.choices
    assert (said.object, choice.text, choice.finish_reason) == ("text_completion", expected.text, "length")
    assert "".join(piece.choices[0].text for piece in pieces) == "".join(choice.logprobs.tokens) == choice.text
    assert all(len(top) == 3 for top in choice.logprobs.top_logprobs)
    assert said.usage.completion_tokens == 16


def asked(text: str, name: str = RED_STAR.name) -> list[Any]:
    picture = sample_pictures() / name
    url = data_uri(picture.read_bytes(), kind=picture.suffix[1:])
    parts = [{"type": "input_image", "image_url": url, "detail": "auto"}, {"type": "input_text", "text": text}]
    return [{"role": "user", "content": parts}]


def test_a_response_is_that_of_the_chat(client: openai.OpenAI) -> None:
    said = client.responses.create(
        model="default", input=asked("What color is the star?"), include=["message.output_text.logprobs"]
    )

    assert (said.output_text, said.status, said.model) == ("red", "completed", "embedded")
    assert said.usage is not None
    assert said.usage.total_tokens == said.usage.input_tokens + said.usage.output_tokens
    assert [token.token for token in said.output[0].content[0].logprobs] == ["red"]
    again = [*asked("What color is the star?"), *said.output, {"role": "user", "content": "Is there a red star?"}]
    assert client.responses.create(model="default", input=again).output_text == "yes"
    cut = client.responses.create(model="default", input=asked("Describe this image."), max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_response_streams(client: openai.OpenAI) -> None:
    with client.responses.stream(model="default", input=asked("Describe this image.")) as stream:
        events = list(stream)
        whole = stream.get_final_response()

    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(pieces) > 1
    assert "".join(pieces) == whole.output_text == STAR.caption
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_what_the_client_s_helpers_make_of_an_answer_can_be_sent_back(client: openai.OpenAI) -> None:
    messages = star("What color is the star?")
    with client.chat.completions.stream(model="default", messages=messages) as stream:
        streamed = stream.get_final_completion().choices[0].message
    parsed = client.chat.completions.parse(model="default", messages=messages).choices[0].message

    for message in (streamed, parsed, streamed.model_dump()):
        follow_up = [*messages, message, {"role": "user", "content": "What shape is the red object?"}]
        said = client.chat.completions.create(model="default", messages=follow_up)
        assert said.choices[0].message.content == "star"


def test_errors_are_those_that_the_client_knows(client: openai.OpenAI) -> None:
    asking: dict[str, Any] = {"model": "default", "messages": star("What?")}
    unreadable, too_long = [user(image(data_uri(RED_STAR.read_bytes()[:900])))], star("What? " * 2000)
    create, respond = client.chat.completions.create, client.responses.create
    for kind, code, ask in (
        (openai.NotFoundError, "model_not_found", lambda: create(**asking | {"model": "gpt-4o"})),
        (openai.BadRequestError, "unsupported_parameter", lambda: create(**asking, logit_bias={"5": 1})),
        (openai.BadRequestError, "truncated", lambda: create(**asking | {"messages": unreadable})),
        (openai.BadRequestError, "context_length_exceeded", lambda: create(**asking | {"messages": too_long})),
        (
            openai.BadRequestError,
            "unsupported_parameter",
            lambda: respond(model="default", input="And?", previous_response_id="r"),
        ),
        (openai.NotFoundError, "response_not_found", lambda: client.responses.retrieve("resp_1")),
    ):
        with pytest.raises(kind) as caught:
            ask()
        assert caught.value.code == code


# Batches

NUM_ROWS = 60


@pytest.mark.proves("serve: batch files", "CPU")
def test_a_batch_survives_a_killed_server(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    flags = ("--batch-folder", str(folder), "--batch-size", "2")
    body = {"model": "default", "messages": star("What color is the star?")}
    rows = [
        json.dumps({"custom_id": f"row-{number}", "method": "POST", "url": CHAT, "body": body})
        for number in range(NUM_ROWS)
    ]
    content = "\n".join([*rows[:1], "no JSON", *rows[1:]]).encode()

    with ServerProcess(*flags) as server, client_of(f"{server.url}/v1") as client:
        file = client.files.create(file=("rows.jsonl", content), purpose="batch")
        assert client.files.content(file.id).content == content
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint=CHAT,
            completion_window="24h",
            metadata={"name": "stars"},
        )
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 3)
        os.kill(server.pid, signal.SIGKILL)
        server.wait(timeout_s=60)
    (records,) = (folder / "batches").glob("*.jsonl")
    answered = {json.loads(line)["id"] for line in records.read_bytes().split(b"\n")[:-1]}
    assert 3 <= len(answered) <= NUM_ROWS

    with ServerProcess(*flags) as server, client_of(f"{server.url}/v1") as client:
        wait_for(lambda: client.batches.retrieve(batch.id).status == "completed")
        done = client.batches.retrieve(batch.id)
        output = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
        (error,) = [json.loads(line) for line in client.files.content(done.error_file_id).text.splitlines()]
        files = {one.id for one in client.files.list()}

    assert [line["custom_id"] for line in output] == [f"row-{number}" for number in range(NUM_ROWS)]
    assert {line["response"]["body"]["choices"][0]["message"]["content"] for line in output} == {"red"}
    assert answered <= {line["id"] for line in [*output, error]}  # not computed a second time
    assert (error["custom_id"], error["error"]["code"]) == (None, "invalid_json_line")
    assert (done.request_counts.total, done.request_counts.failed) == (NUM_ROWS + 1, 1)
    assert done.metadata == {"name": "stars"}
    assert files == {file.id, done.output_file_id, done.error_file_id}
