"""The task registry: its entries, and what a new task needs."""

import asyncio
import dataclasses
import runpy
from collections.abc import Mapping
from typing import Any

import pytest
from starlette.testclient import TestClient

from llama_adapter import Captioner
from llama_adapter.app.captioning.tasks import registry
from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.captioning.tasks.choose import OneOf, choosing, parse_choices
from llama_adapter.app.captioning.tasks.entry import TaskEntry, Widget
from llama_adapter.app.captioning.tasks.prompts import EncodedPrompt, PromptEncoder
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.captioning.tasks.registry import question_of
from llama_adapter.app.captioning.tasks.task import FREE_TEXT, Task, WithTokenIds, task_settings
from llama_adapter.app.serving.http_api.api import ApiSettings, create_api
from llama_adapter.app.serving.online.service import Service
from llama_adapter.app.serving.web.page import build_page
from tests.app.golden import ROOT, model_options
from tests.app.serving.http_api.live import StubService, answer
from tests.app.serving.http_api.requests import chat


@pytest.mark.parametrize(
    ("command", "values", "question"),
    [
        ("caption", {}, Question()),
        ("caption", {"instruction": "Look.", "input": "x"}, Question(instruction="Look.", input="x")),
        ("caption", {"raw": "text"}, Question(raw="text")),
        ("ask", {"instruction": "Red?"}, Question(instruction="Red?")),
        ("ask", {"instruction": "Red?", "choices": ("a", "b")}, Question(instruction="Red?", task=OneOf(("a", "b")))),
    ],
)
def test_the_values_of_options_make_a_question(command: str, values: dict[str, Any], question: Question) -> None:
    assert question_of(values, command=command) == question


@pytest.mark.parametrize(
    ("command", "values"),
    [("caption", {"input": "x"}), ("caption", {"instruction": "a", "raw": "b"}), ("ask", {"instruction": " "})],
)
def test_values_that_do_not_go_together_are_refused(command: str, values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="instruction"):
        question_of(values, command=command)


@pytest.mark.parametrize(
    "choices",
    ["Yes,No", [], ["Yes"], ["Yes", "Yes"], ["Yes", " "], ["Yes", 5], [b"Yes", b"No"], "x" * 9999, [""] * 9999],
)
def test_choices_are_two_different_texts(choices: Any) -> None:
    with pytest.raises(ValueError, match="choices must be") as caught:
        choosing(choices)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "text", ["Yes", "Yes,Yes", "Yes,,No", "", "[Yes, No]", '["Yes", 5]', '["a", "\\ud800"]', "[" * 9999]
)
def test_typed_choices_are_refused_in_a_short_message(text: str) -> None:
    with pytest.raises(ValueError, match="two different answers") as caught:
        parse_choices(text)
    assert repr(text)[:30] in str(caught.value)
    assert len(str(caught.value)) < 200
    assert parse_choices("yes, it is") == ("yes", "it is")
    assert parse_choices('["yes", "no, it is not "]') == ("yes", "no, it is not")


def test_the_likeliest_choice_is_the_answer() -> None:
    empty = Answer(index=3, picture="a", digest="", prompt="", text="", token_ids=(), finish="stop")
    prompt = EncodedPrompt(text="", continuations=((5, 6, 2), (7, 2)), has_end=True)

    answer = OneOf(("red", "green")).complete(empty, prompt=prompt, logprobs=(-1000.0, -1001.0))

    assert (answer.index, answer.text, answer.token_ids, answer.finish) == (3, "red", (5, 6), "choice")
    assert answer.choice == pytest.approx({"red": 0.7310586, "green": 0.2689414})


def test_the_settings_of_records_are_those_of_earlier_versions() -> None:
    assert task_settings(FREE_TEXT) == {"choices": None}
    assert task_settings(OneOf(("Yes", "No"))) == {"choices": ["Yes", "No"]}


def test_the_end_token_closes_choices_that_begin_with_each_other() -> None:
    with Captioner.load(**model_options(), batch_size=1) as captioner:
        encoder, eos_id = PromptEncoder(captioner.tokenizer, check=lambda *_: None), captioner.tokenizer.eos_id

    ends = {ids[-1] == eos_id for ids in encoder.encode("Which?", ("1", "10")).continuations}
    assert ends == {True}
    assert not encoder.encode("Which?", ("yes", "no")).has_end


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Task:
    """The task of the example package, with a field of the page and an input in its questions."""
    example = runpy.run_path(str(ROOT / "docs" / "example-task" / "counting.py"))
    entry: TaskEntry = example["COUNT"]
    [things] = entry.options
    things = dataclasses.replace(things, widget=Widget(label="Count (optional)", info="Gives a number."))

    def question(values: Mapping[str, Any]) -> Question:
        return dataclasses.replace(entry.question(values), input="Look twice.")

    monkeypatch.setattr(
        registry, "installed", lambda: {"count": dataclasses.replace(entry, options=(things,), question=question)}
    )
    return example["Count"]()  # type: ignore[no-any-return]


def client_of(service: StubService) -> TestClient:
    return TestClient(create_api(service, settings=ApiSettings()), base_url="http://localhost")  # type: ignore[arg-type]


def test_http_api_gives_token_ids_on_request() -> None:
    client = client_of(service := StubService())
    for fields in ({}, {"output_ids": False}, {"output_ids": True}, {"output_ids": True, "answer_choices": ["a", "b"]}):
        assert client.post("/v1/chat/completions", json=chat(**fields)).status_code == 200

    choice = OneOf(("a", "b"))
    assert [ask.task for ask in service.asks] == [FREE_TEXT, FREE_TEXT, WithTokenIds(FREE_TEXT), WithTokenIds(choice)]
    prompt = EncodedPrompt(text="?", continuations=((5, 6), (7,)))
    done = WithTokenIds(choice).complete(answer(details={"a": 1}), prompt=prompt, logprobs=(-1.0, -2.0))
    assert (done.text, done.details) == ("a", {"a": 1, "output_ids": [5, 6]})


def test_http_api_offers_new_task(count: Task) -> None:
    client = client_of(service := StubService(lambda handle: handle.deliver(answer(details={"mean": 1.5}))))

    reply = client.post("/v1/chat/completions", json=chat(count_things="stars")).json()
    both = client.post("/v1/chat/completions", json=chat(count_things="stars", answer_choices=["a", "b"]))

    assert [ask.task for ask in service.asks] == [count]
    assert service.asks[0].prompt == ("How many stars are there?", "Look twice.")
    assert reply["choices"][0]["answer_details"] == {"mean": 1.5}
    assert (both.status_code, both.json()["error"]["code"]) == (400, "invalid_value")
    fields = client.get("/openapi.json").json()["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["count_things"]["description"] == "Extension. What to count, such as `red objects`."


@pytest.mark.usefixtures("count")
def test_page_offers_new_task() -> None:
    async def config() -> dict[str, Any]:  # runs in an event loop; otherwise Gradio opens one and never closes it
        return build_page(Service(Captioner.load), samples=[]).get_config_file()  # type: ignore[return-value]

    components = [one["props"] for one in asyncio.run(config())["components"]]
    labels = {one.get("elem_id"): one.get("label") for one in components}
    assert (labels["batch-choices"], labels["batch-things"]) == ("Choices (optional)", "Count (optional)")


def test_options_of_two_tasks_exclude_each_other(count: Task) -> None:
    found = question_of({"things": "stars"})
    assert (found.task, found.instruction) == (count, "How many stars are there?")
    with pytest.raises(ValueError, match="exclude each other"):
        question_of({"things": "stars", "choices": ("a", "b")})
