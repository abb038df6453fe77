"""Which JSON schemas can be answered, which questions they become, and the JSON built from the answers."""

import json
from typing import Any

import pytest

from llama_adapter.app.captioning.tasks.choose import OneOf
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.captioning.tasks.task import FREE_TEXT
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.serving.http_api.chat import understand
from llama_adapter.app.serving.http_api.errors import ApiError
from llama_adapter.app.serving.http_api.schemas import MAX_PROPERTIES, ChatRequest, with_task_fields
from llama_adapter.app.serving.http_api.structured import combined, read_schema
from tests.app.serving.http_api.live import answer
from tests.app.serving.http_api.requests import chat, image, json_schema, user

COLOUR = {"enum": ["red", "blue"], "type": "string", "description": "What color is it?", "title": "Colour"}
STAR = {"type": "boolean", "description": "Is it a star?"}
CAPTION = {"type": "string"}


def asked(properties: dict[str, Any], *texts: str, **parameters: Any) -> list[Question]:
    body = chat(user(image(), *texts), response_format=json_schema(properties), **parameters)
    return list(understand(with_task_fields(ChatRequest).model_validate(body)).questions)


def test_a_property_alone_is_asked_by_the_request_s_text() -> None:
    assert asked({"colour": COLOUR}, "Which one?") == [Question(instruction="Which one?", task=OneOf(("red", "blue")))]
    assert asked({"star": STAR}) == [Question(instruction="Is it a star?", task=OneOf(("yes", "no")))]
    assert asked({"caption": CAPTION}) == [Question()]


def test_several_properties_are_asked_by_their_descriptions() -> None:
    assert asked({"colour": COLOUR, "star": STAR, "caption": CAPTION}, "Describe it.") == [
        Question(instruction="What color is it?", task=OneOf(("red", "blue"))),
        Question(instruction="Is it a star?", task=OneOf(("yes", "no"))),
        Question(instruction="Describe it.", task=FREE_TEXT),
    ]


def test_references_to_definitions_are_followed() -> None:
    schema = {"properties": {"colour": {"$ref": "#/$defs/Colour"}}, "$defs": {"Colour": COLOUR}}

    (colour,) = read_schema(schema, place="s")

    assert (colour.name, list(colour.values or ())) == ("colour", ["red", "blue"])


@pytest.mark.parametrize(
    ("schema", "texts", "made"),
    [
        ({"properties": {"colour": COLOUR, "star": STAR}}, ["blue", "no"], {"colour": "blue", "star": False}),
        ({"properties": {"caption": CAPTION}}, ['a "red"\nstar'], {"caption": 'a "red"\nstar'}),
        ({"properties": {"n": {"enum": [1, 2.5, True]}}}, ["2.5"], {"n": 2.5}),
        (COLOUR, ["red"], "red"),
        ({"type": "boolean"}, ["no"], False),
    ],
)
def test_answers_make_json_of_the_schema(schema: dict[str, Any], texts: list[str], made: Any) -> None:
    properties = read_schema(schema, place="s")

    whole = combined(properties, [answer(text) for text in texts])

    assert json.loads(whole.text) == made
    assert len(whole.token_ids) == sum(len(text.split()) for text in texts)
    assert (whole.finish, whole.prompt_tokens) == ("stop", 5 * len(texts))


def test_probabilities_are_those_of_the_json_values() -> None:
    properties = read_schema({"properties": {"colour": COLOUR, "star": STAR}}, place="s")
    answers = [answer("red", choice={"red": 0.75, "blue": 0.25}), answer("no", choice={"yes": 0.5, "no": 0.5})]

    assert combined(properties, answers).details == {
        "probabilities": {"colour": {"red": 0.75, "blue": 0.25}, "star": {"true": 0.5, "false": 0.5}}
    }
    assert combined(properties[1:2], answers[1:]).choice is None
    assert combined(read_schema(STAR, place="s"), answers[1:]).choice == {"true": 0.5, "false": 0.5}


def test_the_first_failure_is_the_answer_s() -> None:
    properties = read_schema({"properties": {"colour": COLOUR, "star": STAR}}, place="s")
    failed = answer("", error=AnswerError(code="deadline", message="Too late."))

    assert combined(properties, [answer("red"), failed]) is failed


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({}, "s.type"),
        ({"type": "array", "items": CAPTION}, "s.type"),
        ({"type": "object"}, "s.properties"),
        ({"type": "object", "properties": {}}, "s.properties"),
        ({"type": "object", "properties": {f"p{i}": CAPTION for i in range(MAX_PROPERTIES + 1)}}, "s.properties"),
        ({"type": "object", "properties": {"a": CAPTION}, "required": ["b"]}, "s.required"),
        ({"type": "object", "properties": {"a": CAPTION}, "minProperties": 1}, "s.minProperties"),
        ({"properties": {"a": {"type": "integer"}}}, "s.properties.a.type"),
        ({"properties": {"a": {"type": "integer", "minimum": 0}}}, "s.properties.a.type"),
        ({"properties": {"a": {"type": ["string", "null"]}}}, "s.properties.a.type"),
        ({"properties": {"a": {"type": "string", "pattern": "a"}}}, "s.properties.a.pattern"),
        ({"properties": {"a": {"anyOf": [CAPTION]}}}, "s.properties.a.anyOf"),
        ({"properties": {"a": {"type": "object", "properties": {}}}}, "s.properties.a.type"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "s.properties.a"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": []}}, "s.properties.a"),
        ({"properties": {"a": True}}, "s.properties.a"),
        ({"properties": {"a": {"enum": ["x"]}}}, "s.properties.a.enum"),
        ({"properties": {"a": {"enum": ["x", "x"]}}}, "s.properties.a.enum"),
        ({"properties": {"a": {"enum": ["x", ""]}}}, "s.properties.a.enum"),
        ({"properties": {"a": {"enum": ["x", None]}}}, "s.properties.a.enum"),
        ({"properties": {"a": {"enum": ["1", 1]}}}, "s.properties.a.enum"),
        ({"properties": {"a": {"enum": ["1", "2"], "type": "integer"}}}, "s.properties.a.enum"),
        ({"properties": {"a": {"enum": [True, False], "type": "integer"}}}, "s.properties.a.enum"),
        ({"properties": {"no name": {"type": "number"}}}, "s.properties.type"),
    ],
)
def test_other_schemas_are_refused_by_the_place_that_is_not_supported(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_schema(schema, place="s")

    assert (caught.value.http_status, caught.value.code, caught.value.param) == (400, "unsupported_schema", place)


@pytest.mark.parametrize(
    ("properties", "parameters", "param"),
    [
        ({f"p{i}": STAR for i in range(MAX_PROPERTIES)}, {"n": 3}, "n"),  # the questions of a request are bounded
        ({"colour": COLOUR}, {"answer_choices": ["a", "b"]}, None),
    ],
)
def test_parameters_that_do_not_go_with_a_schema_are_refused(
    properties: dict[str, Any], parameters: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(ApiError) as caught:
        asked(properties, **parameters)

    assert (caught.value.code, caught.value.param) == ("invalid_value", param)
