"""Answers in JSON and by regular expressions, with the embedded model."""

import json
import re
import sys
from collections.abc import Sequence
from random import Random
from typing import Any

import jsonschema
import pytest

from llama_adapter import Answer, Captioner
from llama_adapter.app.captioning.active_request import ActiveRequest
from llama_adapter.app.captioning.stage_clock import StageClock
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.llm.engine import grammars
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.errors import GrammarError
from llama_adapter.runtime.errors import UsageError

PICTURE = sample_pictures() / "12-red-star.jpg"
QUESTION = "What color is the star?"


@pytest.fixture(scope="module")
def embedded() -> Captioner:
    return Captioner.load()


def together(captioner: Captioner, settings: Sequence[SamplingParams]) -> list[Answer]:
    """One answer for each, in shared batches."""
    prompts = [captioner.encode_prompt(QUESTION, sampling=sampling) for sampling in settings]
    requests = [
        ActiveRequest(index=index, picture="", digest="", prompt=prompt, sampling=sampling)
        for index, (prompt, sampling) in enumerate(zip(prompts, settings, strict=True))
    ]
    answers: list[Answer] = []
    with captioner.open_loop(StageClock()) as loop:
        loop.start([(captioner.reader.read(PICTURE, name="").content, requests)])
        while loop.in_flight:
            answers += [event for event in loop.step() if isinstance(event, Answer)]
    return sorted(answers, key=lambda answer: answer.index)


def schema_of(random: Random, depth: int = 0) -> dict[str, Any]:
    low, few = random.randint(-20, 20), random.randint(0, 2)
    flat: list[dict[str, Any]] = [
        {"type": "string", "maxLength": random.randint(0, 9)},
        {"type": "string", "pattern": "^[A-Z][a-z]{2,5}$"},
        {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 300)},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": ["boolean", "null"]},
        {"enum": ["red", 7, None, 'a "b" \\ é 星']},
        {"anyOf": [{"const": 1.5}, {"type": "string", "format": "date"}]},
    ]
    if depth == 2 or random.random() < 0.4:
        return random.choice(flat)
    if random.random() < 0.5:
        return {"type": "array", "items": schema_of(random, depth + 1), "minItems": few, "maxItems": few + 2}
    names = random.sample(["color", "shape", "size of it", "número"], random.randint(1, 4))
    properties = {name: schema_of(random, depth + 1) for name in names}
    return {"type": "object", "properties": properties, "required": names[:few], "additionalProperties": False}


def regex_of(random: Random, depth: int = 0) -> str:
    parts = ["red", " star", r"[a-z]{1,4}", r"\d{2}", "[^a-z]", " ", r"\.", "é", "星{1,2}", r"\w?", "(?:x/y|/)", r"\n"]
    if depth < 2:
        parts += [f"(?:{regex_of(random, depth + 1)}|{regex_of(random, depth + 1)})" for _ in range(6)]
        parts += [f"(?:{regex_of(random, depth + 1)}){{0,{random.randint(1, 3)}}}"]
    return "".join(random.choices(parts, k=random.randint(1, 4)))


@pytest.mark.proves("answers by JSON schema or regular expression", "CPU")
def test_finished_answers_follow_their_form_and_free_ones_do_not_change(embedded: Captioner) -> None:
    random = Random(7)
    schemas, expressions = [schema_of(random) for _ in range(25)], [regex_of(random) for _ in range(25)]
    forms: list[dict[str, Any]] = [{"json_schema": schema} for schema in schemas]
    forms += [{"regex": expression} for expression in expressions]
    drawn: list[dict[str, Any]] = [{"temperature": 1.5, "top_p": 1.0}, {}, {"repetition_penalty": 1.2}, {"min_p": 0.1}]
    settings = [
        SamplingParams(max_new_tokens=150, seed=number, **form, **drawn[number % 4])
        for number, form in enumerate(forms)
    ]
    free = [SamplingParams(max_new_tokens=9, temperature=0.9 * (number % 2), seed=number) for number in range(10)]
    mixed = [one for group in zip(*[iter(settings)] * 5, strict=True) for one in (*group, free[len(group)])]

    answers = together(embedded, mixed)

    finished = [(one, answer.text) for one, answer in zip(mixed, answers, strict=True) if answer.finish == "stop"]
    constrained = [(one, text) for one, text in finished if one.json_schema or one.regex is not None]
    assert len(constrained) >= 45
    for sampling, text in constrained:
        if sampling.json_schema is None:
            assert re.fullmatch(sampling.regex or "", text), (sampling.regex, text)
        else:
            jsonschema.validate(json.loads(text), json.loads(sampling.json_schema))
    assert all(len(answer.token_ids) == 150 for answer in answers if answer.finish == "length" and answer.text)
    alone = together(embedded, [free[5]])[0].text
    assert {answer.text for one, answer in zip(mixed, answers, strict=True) if one == free[5]} == {alone}


@pytest.mark.parametrize(
    ("schema", "keys"),
    [
        (
            {"type": "object", "properties": {"properties": {"type": "boolean"}}, "required": ["properties"]},
            "properties",
        ),
        ({"anyOf": [{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}]}, "a"),
        # A reference alone in an `allOf`, as pydantic 1 writes a type with a description:
        (
            {
                "$defs": {"B": {"properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "type": "object"}},
                "allOf": [{"$ref": "#/$defs/B"}],
            },
            "a",
        ),
    ],
)
def test_objects_have_only_properties_that_the_schema_names(
    embedded: Captioner, schema: dict[str, Any], keys: str
) -> None:
    (answer,) = embedded.generate(PICTURE, QUESTION, json_schema=schema, max_new_tokens=60)
    assert answer.finish == "stop"
    assert list(json.loads(answer.text)) == [keys]


def test_parts_of_a_schema_and_named_types_of_properties_stay_open(embedded: Captioner) -> None:
    parts = [{"properties": {name: {"const": 1}}, "required": [name]} for name in "ab"]
    typed = {"properties": {}, "additionalProperties": {"type": "boolean"}, "required": ["c"]}
    deep = [{"properties": {"o": {"type": "object", **part}}, "required": ["o"]} for part in parts]
    by_name = {"$defs": {"A": parts[0], "B": parts[1]}, "allOf": [{"$ref": f"#/$defs/{name}"} for name in "AB"]}
    base = {"$defs": {"B": parts[0]}, "$ref": "#/$defs/B", **parts[1]}
    named = [{"properties": {"a": {"enum": ["x"], "type": "string", "format": "color"}}, "required": ["a"]}]
    for schema, first in (
        ({"allOf": parts}, '{"a": 1'),
        ({"allOf": deep}, '{"o": {"a": 1, "b": 1'),
        (by_name, '{"a": 1, "b": 1'),
        ({"definitions": {"A": parts[0]}, "allOf": [{"$ref": "#/definitions/A"}, parts[1]]}, '{"a": 1, "b": 1'),
        (base, '{"a": 1, "b": 1'),
        ({"allOf": named}, '{"a": "x"'),
        (typed, '{"'),
    ):
        (answer,) = embedded.generate(PICTURE, QUESTION, json_schema={"type": "object", **schema}, max_new_tokens=60)
        assert answer.error is None
        assert answer.text.startswith(first)
        assert answer.text != "{}"


def test_every_method_keeps_the_form(embedded: Captioner) -> None:
    (digit,) = embedded.generate(PICTURE, QUESTION, regex=r"\d")
    (named,) = embedded.generate(PICTURE, QUESTION, json_schema={"enum": ["red"], "type": "string", "format": "color"})
    (cut,) = embedded.generate(PICTURE, QUESTION, regex="[a-z ]{200}", max_new_tokens=5)
    pieces = list(embedded.stream([PICTURE] * 2, QUESTION, regex=r"  \((green|blue)\)"))
    (text,) = embedded.generate_text("Hello", json_schema='{"type": "array", "maxItems": 0}')

    assert (cut.finish, len(cut.token_ids)) == ("length", 5)
    assert all(re.fullmatch(r"  \((green|blue)\)", one.text) for one in pieces if isinstance(one, Answer))
    assert digit.text in "0123456789"
    assert named.text == '"red"'
    assert text.text == "[]"
    assert embedded.ask(PICTURE, QUESTION, choices=["red", "blue"], regex="x").text == "red"  # scored answers have none


UNNAMED, NUMBERED = ({"properties": {}, "required": required} for required in ([[1]], 5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json_schema": {"not": {}, "if": True}}, "uses `if`, `not`, which is not supported"),
        ({"json_schema": {"type": "strnig"}}, "The JSON schema is invalid, or too complex"),
        *(
            ({"json_schema": one}, "The JSON schema is invalid, or")
            for one in (UNNAMED, {"allOf": [UNNAMED]}, NUMBERED)
        ),
        ({"json_schema": '{"a": ' + "[" * 700 + "]" * 700 + "}"}, "The JSON schema is nested too deeply"),
        ({"json_schema": {"properties": {f"p{i}": {} for i in range(4000)}}}, "The JSON schema is invalid, or too"),
        ({"regex": "(secret"}, "The regular expression is invalid, or too complex"),
        (
            {"regex": "(?=a)"},
            r"The regular expression has look-around, \b, ^ or $ inside, or a back-reference, which is not",
        ),
        ({"regex": r"\bred\b"}, "The regular expression has look-around"),
        ({"regex": "(?m)^a"}, "The regular expression has look-around"),
        ({"json_schema": {"type": "string", "pattern": "a$b"}}, "The JSON schema has look-around"),
        ({"json_schema": {"type": "string", "pattern": r"^(?!^[-+.]*$)[0-9]*$"}}, "The JSON schema has look-around"),
        ({"json_schema": {"type": "string", "pattern": r"(a)\1"}}, "The JSON schema has look-around"),
        ({"json_schema": {"$ref": "#/$defs/look-around"}}, "The JSON schema is invalid, or too complex"),
        ({"regex": "a" * 70_000}, "has 70,000 characters, the limit is 65,536"),
    ],
)
def test_forms_that_cannot_be_followed_are_refused(embedded: Captioner, options: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(message)) as caught:
        embedded.caption(PICTURE, **options)

    assert "secret" not in caught.value.message
    for other in ({"json_schema": "[]"}, {"json_schema": "{"}, {"regex": 3}, {"regex": "a", "json_schema": {}}):
        with pytest.raises(ValueError, match=r"json_schema|regex"):
            SamplingParams(**other)


def test_preparing_a_form_takes_limited_time(embedded: Captioner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "COMPILE_LIMIT_S", 0.001)

    with pytest.raises(GrammarError, match=r"took more than 0\.001 s"):
        embedded.caption(PICTURE, json_schema={"properties": {f"p{i}": {} for i in range(900)}})


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)

    with pytest.raises(UsageError, match="need the package llguidance") as caught:
        Captioner.load().caption(PICTURE, regex="a")
    assert "[structured]" in caught.value.hint
