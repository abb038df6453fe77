"""Which JSON schemas can be answered, which questions they become, and the JSON built from the answers."""

import asyncio
import dataclasses
import functools
import json
import re
from typing import Any

import jsonschema
import pytest

from llama_adapter import Captioner
from llama_adapter.app.captioning.tasks.choose import OneOf
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.captioning.tasks.task import FREE_TEXT
from llama_adapter.app.models.spec import ModelInfo
from llama_adapter.app.serving.http_api import conversation
from llama_adapter.app.serving.http_api.api import forms
from llama_adapter.app.serving.http_api.asking import Form, PartedAnswer
from llama_adapter.app.serving.http_api.conversation import ChatQuestion
from llama_adapter.app.serving.http_api.errors import ApiError
from llama_adapter.app.serving.http_api.schemas import MAX_PROPERTIES
from llama_adapter.app.serving.http_api.structured import combined, read_schema
from llama_adapter.app.serving.online.request_handle import RequestHandle
from llama_adapter.app.serving.online.service import Service
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.picture_format import PictureFormat
from tests.app.serving.http_api.live import INFO, answer, api_of, failed
from tests.app.serving.http_api.requests import CHAT as CHAT_PATH
from tests.app.serving.http_api.requests import RED_STAR, chat, data_uri, image, json_schema, user
from tests.app.serving.online.waiting import started

COLOUR = {"enum": ["red", "blue"], "type": "string", "description": "What color is it?", "title": "Colour"}
STAR = {"type": "boolean", "description": "Is it a star?"}
CAPTION = {"type": "string"}
CHAT, RESPONSES, COMPLETIONS = forms().values()


def asked(properties: dict[str, Any], *texts: str) -> list[Question]:
    body = chat(user(image(), *texts), response_format=json_schema(properties))
    (questions,) = understood(CHAT, body).prompts
    return list(questions)


def understood(form: Form[Any], body: dict[str, Any], *, info: ModelInfo = INFO) -> ChatQuestion:
    return form.reply.understand(form.request.model_validate(body), info)


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
    assert asked({"star": {**STAR, "description": " "}, "caption": CAPTION}, "A star?")[0].instruction == "A star?"


PLAIN_COLOUR = {"enum": ["red", "blue", None], "type": ["string", "null"]}
OR_NONE = {"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}], "default": None}
NULL = {"type": "null"}
BASE = {"type": "object", "properties": {"star": STAR}, "required": ["star"], "additionalProperties": False}
WHOLE = {"type": "object", "properties": {"colour": {"$ref": "#/$defs/Colour"}}, "required": ["colour"]}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"colour": {"$ref": "#/$defs/Colour"}}, "$defs": {"Colour": COLOUR}},
        # As libraries for zod write a type that is used twice:
        {"properties": {"colour": {"$ref": "#/definitions/c d"}}, "definitions": {"c d": COLOUR}},
        {"properties": {"colour": COLOUR, "other": {"$ref": "#/properties/colour"}}},
        # As older pydantic writes a type with a description:
        {"properties": {"colour": {"allOf": [{"$ref": "#/$defs/C"}], "description": "?"}}, "$defs": {"C": COLOUR}},
        # As invopop/jsonschema writes it:
        {"$id": "https://example.com/s", "$ref": "#/$defs/Whole", "$defs": {"Whole": WHOLE, "Colour": COLOUR}},
        # Values that may be null, as pydantic, Home Assistant and others write them:
        {"properties": {"colour": OR_NONE}, "$defs": {"Colour": COLOUR}},
        {"properties": {"colour": {"anyOf": [{"type": "null"}, PLAIN_COLOUR]}}},
        {"properties": {"colour": {"oneOf": [COLOUR, {"type": "null"}]}}},
        {"properties": {"colour": PLAIN_COLOUR}},
        {"properties": {"colour": {**PLAIN_COLOUR, "type": ["null", "string"]}}},
    ],
)
def test_references_are_followed_and_null_is_no_answer(schema: dict[str, Any]) -> None:
    properties = read_schema(schema, place="s")

    assert properties[0].name == "colour"
    assert {tuple(one.values or ()) for one in properties} == {("red", "blue")}


@pytest.mark.parametrize(
    "reference", [{"$ref": "#/$defs/C"}, {"allOf": [{"$ref": "#/$defs/C"}]}, {"anyOf": [COLOUR, NULL]}]
)
def test_a_property_s_own_description_replaces_that_of_its_definition(reference: dict[str, Any]) -> None:
    schema = {"properties": {"colour": {**reference, "description": "Which?"}}, "$defs": {"C": COLOUR}}
    assert [one.description for one in read_schema(schema, place="s")] == ["Which?"]


def nested(depth: int) -> dict[str, Any]:
    return functools.reduce(lambda inner, _: {"anyOf": [inner]}, range(depth), CAPTION)


@pytest.mark.parametrize(
    ("schema", "texts", "made"),
    [
        ({"properties": {"colour": COLOUR, "star": STAR}}, ["blue", "no"], {"colour": "blue", "star": False}),
        ({"properties": {"caption": CAPTION}}, ['a "red"\nstar'], {"caption": 'a "red"\nstar'}),
        ({"properties": {"star": STAR}, "strict": True}, ["yes"], {"star": True}),  # as Home Assistant writes it
        ({"properties": {"star": {**STAR, "type": ["boolean", "null"]}}}, ["no"], {"star": False}),
        ({"properties": {"caption": {"anyOf": [CAPTION, {"type": "null"}]}}}, ["a star"], {"caption": "a star"}),
        ({**COLOUR, "$schema": "https://json-schema.org/draft/2020-12/schema"}, ["red"], "red"),
        ({"properties": {"n": {"enum": [1, 2.5, True]}}}, ["2.5"], {"n": 2.5}),
        ({"properties": {"star": STAR}, "allOf": [{"required": ["star"]}]}, ["no"], {"star": False}),
        ({"allOf": [{"$ref": "#/$defs/B"}], "type": "object", "$defs": {"B": BASE}}, ["no"], {"star": False}),
        (COLOUR, ["red"], "red"),
        ({"type": "boolean"}, ["no"], False),
    ],
)
def test_answers_make_json_of_the_schema(schema: dict[str, Any], texts: list[str], made: Any) -> None:
    properties = read_schema(schema, place="s")

    whole = combined(properties, [answer(text) for text in texts])

    assert json.loads(whole.text) == made
    jsonschema.validate(made, schema)
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


def test_the_first_failure_is_the_answer_and_cancels_the_other_requests() -> None:
    properties = read_schema({"properties": {"colour": COLOUR, "star": STAR}}, place="s")
    late = failed("deadline")
    handles = [RequestHandle(number, cancel=lambda handle: None) for number in range(2)]
    handles[0].deliver(late)

    assert asyncio.run(PartedAnswer(handles, properties).answer()) is late
    assert handles[1].is_cancelled


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({}, "s.type"),
        ({"type": "array", "items": CAPTION}, "s.type"),
        ({"type": "object"}, "s.properties"),
        ({"type": "object", "properties": {f"p{i}": CAPTION for i in range(MAX_PROPERTIES + 1)}}, "s.properties"),
        ({"type": "object", "properties": {"a": CAPTION}, "required": ["b"]}, "s.required"),
        ({"type": "object", "properties": {"a": CAPTION}, "minProperties": 1}, "s.minProperties"),
        ({"properties": {"a": {"type": "integer", "minimum": 0}}}, "s.properties.a.type"),
        ({"properties": {"a": {"type": ["string", "boolean"]}}}, "s.properties.a.type"),
        ({"properties": {"a": {"type": ["integer", "null"]}}}, "s.properties.a.type"),
        ({"properties": {"a": {"anyOf": [CAPTION, STAR]}}}, "s.properties.a.anyOf"),
        ({"properties": {"a": {"anyOf": [{**CAPTION, "minLength": 9}, NULL]}}}, "s.properties.a.minLength"),
        ({"properties": {"a": {"allOf": [CAPTION, NULL]}}}, "s.properties.a.allOf"),
        ({"properties": {"a": nested(3)}}, "s.properties.a.anyOf"),
        ({"properties": {"a": nested(3_000)}}, "s.properties.a.anyOf"),
        # Both sides constrain the same:
        ({"properties": {"a": {"anyOf": [STAR, NULL], "type": "string"}}}, "s.properties.a.anyOf"),
        ({"properties": {"a": {"allOf": [COLOUR], "enum": ["blue", "green"]}}}, "s.properties.a.allOf"),
        ({"properties": {"a": {"allOf": [{"enum": [0, 1]}], "enum": [False, True]}}}, "s.properties.a.allOf"),
        ({"allOf": [{"$ref": "#/$defs/B"}], "properties": {"a": CAPTION}, "$defs": {"B": BASE}}, "s"),
        ({"$ref": "#/$defs/B", "properties": {"a": CAPTION}, "$defs": {"B": BASE}}, "s"),
        ({"allOf": [{"properties": {"a": CAPTION}}], "additionalProperties": False}, "s.allOf"),
        ({"properties": {"a": CAPTION}, "anyOf": [{"additionalProperties": False}]}, "s.anyOf"),
        ({"properties": {"a": {"type": "string", "pattern": "a"}}}, "s.properties.a.pattern"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "s.properties.a"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": []}}, "s.properties.a"),
        ({"properties": {"a": {"$ref": "other.json/$defs/b"}}, "$defs": {"b": CAPTION}}, "s.properties.a"),
        ({"properties": {"a": {"$ref": "#/$defs/b~1c"}}, "$defs": {"b~1c": CAPTION}}, "s.properties.a"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"$ref": "#/$defs/b"}}}, "s.properties.a"),
        ({"properties": {"a": {"$ref": "#"}}}, "s.properties.a.properties"),
        ({"$ref": "#/$defs/b"}, "s"),
        ({"properties": {"a": True}}, "s.properties.a"),
        ({"properties": {"a": {"enum": ["x"]}}}, "s.properties.a.enum"),
        ({"properties": {"a": {"enum": ["x", "x"]}}}, "s.properties.a.enum"),
        ({"properties": {"a": {"enum": ["x", "\n"]}}}, "s.properties.a.enum"),
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


NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ANY = {"type": "object"}


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [
        (
            {"response_format": json_schema({"n": {"type": "integer"}})},
            {"json_schema": {**NUMBER, "additionalProperties": False}},
        ),
        ({"response_format": {"type": "json_object"}}, {"json_schema": ANY}),
        ({"response_format": {"type": "json_object", "schema": NUMBER}}, {"json_schema": NUMBER}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": NUMBER, "strict": "true"}}},
            {"json_schema": NUMBER},
        ),
        ({"json_schema": NUMBER}, {"json_schema": NUMBER}),
        ({"guided_json": NUMBER}, {"json_schema": NUMBER}),
        ({"guided_json": json.dumps(NUMBER)}, {"json_schema": NUMBER}),
        ({"guided_regex": "a|b"}, {"regex": "a|b"}),
        ({"structured_outputs": {"json": NUMBER, "regex": None}}, {"json_schema": NUMBER}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": ANY}),
        ({"structured_outputs": {"regex": "[0-9]"}}, {"regex": "[0-9]"}),
    ],
)
def test_what_separate_questions_cannot_answer_guides_the_whole_answer(parameters: Any, wanted: dict[str, Any]) -> None:
    asked = [understood(CHAT, chat(**parameters))]
    asked.append(understood(COMPLETIONS, {"model": "m", "prompt": "p", **parameters}))
    formats = {"json_schema": lambda own: {"type": "json_schema", **own["json_schema"]}, "json_object": lambda own: own}
    given = parameters.get("response_format")
    others = parameters if given is None else {"text": {"format": formats[given["type"]](given)}}
    asked.append(understood(RESPONSES, {"model": "m", "input": "p", **others}))

    for one in asked:
        assert one.properties == ()
        sampling = dataclasses.replace(one.sampling, max_new_tokens=64)
        assert sampling == SamplingParams(**wanted)


PLAIN_STAR, SIZE = {"type": "boolean"}, {"enum": ["small", "large"]}


@pytest.mark.parametrize(
    ("properties", "descriptions"),
    [
        ({"star": STAR}, [""]),
        ({"caption": CAPTION}, [""]),
        ({"star": STAR, "colour": COLOUR}, ["\nIs it a star?", "\nWhat color is it?"]),
        ({"star": PLAIN_STAR, "size": SIZE}, ["", ""]),
        ({"star": PLAIN_STAR, "large": PLAIN_STAR}, None),  # the same question twice
        ({"star": {"enum": ["yes", "no"]}, "large": {"enum": ["no", "yes"]}}, None),
        ({"size": SIZE, "box": {"enum": ["medium", "large"]}}, None),
        ({"size": SIZE, "star": {**STAR, "type": "string", "enum": ["large", "no"]}}, ["", "\nIs it a star?"]),
        ({"star": STAR, "colour": {**COLOUR, **STAR, "type": "string"}}, ["\nIs it a star?"] * 2),
        ({"star": STAR, "large": {**STAR, "type": "string", "enum": ["no", "yes"]}}, None),
        ({"star": STAR, "caption": {**CAPTION, "description": "Describe it."}}, None),
    ],
)
def test_without_a_picture_several_questions_are_choices_and_have_the_text(
    properties: dict[str, Any], descriptions: list[str] | None
) -> None:
    body = chat(user("A red star. Which one?"), response_format=json_schema(properties))
    asked = understood(CHAT, body)
    assert len(asked.properties) == len(descriptions or ())
    assert asked.sampling.is_constrained is (descriptions is None)
    assert [one.instruction for one in asked.prompts[0]] == [
        f"A red star. Which one?{description}" for description in descriptions or [""]
    ]


@pytest.mark.parametrize(
    ("properties", "num_questions"),
    [
        ({"caption": CAPTION}, 1),
        ({"star": STAR, "colour": COLOUR}, 2),
        ({"star": STAR, "caption": {**CAPTION, "description": "Describe it."}}, 2),
        ({"star": PLAIN_STAR, "large": PLAIN_STAR}, 0),  # the same question twice
        ({"star": STAR, "caption": {**CAPTION, "description": " "}}, 0),
    ],
)
def test_a_model_that_sees_pictures_as_tokens_is_asked_in_parts_if_these_differ(
    properties: dict[str, Any], num_questions: int
) -> None:
    form = PictureFormat(token="<image>", token_id=9, tokens_each=10)
    info = dataclasses.replace(INFO, has_adapter=False, template="chat", picture_format=form)
    asked = understood(CHAT, chat(user(image(), "What?"), response_format=json_schema(properties)), info=info)
    assert (len(asked.properties), asked.sampling.is_constrained) == (num_questions, not num_questions)


@pytest.mark.parametrize(("n", "num_questions"), [(1, 3), (10, 3), (11, 0), (16, 0)])
def test_more_questions_than_a_request_may_have_guide_the_answer(n: int, num_questions: int) -> None:
    schema = json_schema({name: {**COLOUR, "description": name} for name in "abc"})
    for message in (user("A red star."), user(image())):
        asked = understood(CHAT, chat(message, n=n, response_format=schema))
        assert (len(asked.properties), asked.sampling.is_constrained) == (num_questions, not num_questions)


def test_a_schema_as_text_is_asked_as_the_schema() -> None:
    schema = {"properties": {"star": STAR, "caption": CAPTION}}
    texts, given = (chat(guided_json=one) for one in (json.dumps(schema), schema))
    assert understood(CHAT, texts).prompts == understood(CHAT, given).prompts
    assert len(understood(CHAT, texts).properties) == 2
    with pytest.raises(ApiError, match="is no JSON schema"):
        understood(CHAT, chat(guided_json="[" * 40_000))


def test_choices_of_structured_outputs_are_scored() -> None:
    choice = {"structured_outputs": {"choice": ["red", "blue"]}}
    bodies = (CHAT, chat(**choice)), (RESPONSES, {"input": "p", **choice}), (COMPLETIONS, {"prompt": "p", **choice})
    for form, body in bodies:
        one = understood(form, body)
        assert [question.task for (question,) in one.prompts] == [OneOf(("red", "blue"))]
        assert not one.sampling.is_constrained


def test_without_the_package_only_separate_questions_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "find_spec", lambda name: None)

    with pytest.raises(ApiError) as caught:
        asked({"n": {"type": "integer"}})
    assert caught.value.code == "unsupported_schema"
    assert len(asked({"star": STAR})) == 1
    text = chat(user("A star."), response_format=json_schema({"star": STAR, "caption": CAPTION}))
    assert [one.instruction for one in understood(CHAT, text).prompts[0]] == ["A star.\nIs it a star?", "A star."]
    same = json_schema(dict.fromkeys("abc", PLAIN_STAR))
    assert len(understood(CHAT, chat(user("A star."), response_format=same)).properties) == 3
    with pytest.raises(ApiError, match="the schema's properties is 33, the limit is 32"):
        understood(CHAT, chat(user("A star."), n=11, response_format=same))
    # The service refuses this, and names the package:
    assert understood(CHAT, chat(response_format={"type": "json_object"})).sampling.is_constrained


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"guided_regex": "a", "json_schema": NUMBER}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a", "b"]}}, "structured_outputs.choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"guided_regex": "a", "answer_choices": ["a", "b"]}, None),
        ({"response_format": json_schema({"colour": COLOUR}), "answer_choices": ["a", "b"]}, None),
    ],
)
def test_forms_that_are_no_form_or_do_not_go_with_other_parameters_are_refused(
    parameters: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(ApiError) as caught:
        understood(CHAT, chat(**parameters))

    assert (caught.value.code, caught.value.param) == ("invalid_value", param)


def test_the_service_answers_in_each_form_or_says_why_not() -> None:
    array = {"type": "array", "items": {"enum": ["a", 3]}, "minItems": 2, "maxItems": 4}
    asked = user(image(data_uri(RED_STAR.read_bytes())), "What color is it?")

    def sent(**parameters: Any) -> Any:
        return api.post(CHAT_PATH, json=chat(asked, **parameters)).json()

    with started(Service(Captioner.load)) as service:
        api = api_of(service)
        (one,) = sent(guided_regex="(red|blue) [a-z]{2,5}!")["choices"]
        several = sent(json_schema=array, n=3, seed=4, temperature=1)["choices"]
        (cut,) = sent(response_format={"type": "json_schema", "json_schema": {"schema": ANY}}, max_tokens=1)["choices"]
        error = sent(json_schema={"not": {}})["error"]

    assert re.fullmatch("(red|blue) [a-z]{2,5}!", one["message"]["content"])
    for choice in several:
        jsonschema.validate(json.loads(choice["message"]["content"]), array)
    assert cut["finish_reason"] == "length"
    assert error["message"] == "The JSON schema uses `not`, which is not supported."
