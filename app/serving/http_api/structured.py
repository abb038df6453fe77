"""Answers that follow a JSON schema: each property is asked as a separate question, so the JSON is always valid.

An enum or a boolean gets the most probable of its values, a string gets generated text.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.captioning.tasks.choose import OneOf
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.serving.http_api.errors import PARAMETER, ApiError
from llama_adapter.app.serving.http_api.schemas import MAX_PROPERTIES, MAX_TEXTS

_POINTER: Final = re.compile("#(/[^/~%]+){0,8}")  # names without escapes
_NOTES: Final = {"title", "description", "default", "examples", "$comment", "$schema", "$id", "strict"}
_OBJECT: Final = {*_NOTES, "$defs", "definitions", "type", "properties", "required", "additionalProperties"}
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Property:
    """One value of the wanted JSON."""

    name: str | None  # None: the value is the whole JSON
    description: str | None
    values: Mapping[str, Any] | None  # scored text -> JSON value; None: the value is generated text

    def question_in(self, question: Question, *, is_alone: bool, has_picture: bool) -> Question:
        """The question for this value, made from the request's `question`.

        The value's description replaces the instruction; without a picture it follows the instruction, which it is
        about. If the value is the only one (`is_alone`), its description is used only if the request asks for a
        caption. An enum's values are the choices.
        """
        if self.description and (not is_alone or question.is_caption):
            instruction = self.description if has_picture else f"{question.instruction}\n{self.description}"
            question = dataclasses.replace(question, instruction=instruction)
        return question if self.values is None else dataclasses.replace(question, task=OneOf(tuple(self.values)))


def read_schema(schema: Mapping[str, Any], *, place: str) -> tuple[Property, ...]:
    """The values that a JSON schema requires; raises ApiError for a schema that separate questions cannot answer.

    `place` is the place of the schema in the request.
    """
    whole = _plain(schema, root=schema)
    if whole.get("type", "object" if "properties" in whole else None) != "object":
        return (_property(None, whole, place=place),)
    _check_keywords(whole, _OBJECT, place=place)
    properties, required = whole.get("properties"), whole.get("required", [])
    if not isinstance(properties, dict) or not 1 <= len(properties) <= MAX_PROPERTIES:
        raise _unsupported(f"{place}.properties", f"an object has 1 to {MAX_PROPERTIES} properties")
    if not isinstance(required, list) or not all(isinstance(name, str) and name in properties for name in required):
        raise _unsupported(f"{place}.required", "it lists names of `properties`")
    return tuple(
        _property(name, _plain(content, root=schema), place=_inside(f"{place}.properties", name))
        for name, content in properties.items()
    )


def combined(properties: Sequence[Property], answers: Sequence[Answer]) -> Answer:
    """One answer with the JSON of all values, combined from `answers`. None of them has an error."""
    found = list(zip(properties, answers, strict=True))
    values = {item.name: answer.text if item.values is None else item.values[answer.text] for item, answer in found}
    probabilities = {
        item.name: {_shown(item.values[text]): probability for text, probability in answer.choice.items()}
        for item, answer in found
        if item.values is not None and answer.choice is not None
    }
    return dataclasses.replace(
        answers[0],
        text=json.dumps(values.get(None, values), ensure_ascii=False),
        token_ids=tuple(token_id for answer in answers for token_id in answer.token_ids),
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        finish="length" if any(answer.finish == "length" for answer in answers) else "stop",
        choice=probabilities.get(None),
        details={"probabilities": probabilities} if probabilities.keys() - {None} else {},
        logprobs=(),
    )


def _plain(schema: Any, *, root: Mapping[str, Any]) -> Any:
    """A schema joined with its only part, or the part of `root` that it refers to; without null, which is no answer."""
    for _ in range(2):  # levels
        match schema:
            case (
                {"anyOf": [part] | [part, {"type": "null"}] | [{"type": "null"}, part], **others}
                | {"oneOf": [part] | [part, {"type": "null"}] | [{"type": "null"}, part], **others}
                | {"allOf": [part], **others}
            ):
                schema = _joined(part, others) or schema
            case {"$ref": str(reference), **others} if _POINTER.fullmatch(reference):
                found: Any = {"#": root}
                for name in reference.split("/"):
                    found = found.get(name) if isinstance(found, dict) else None
                schema = _joined(found, others) or schema
    match schema:
        case {"type": [str(kind), "null"] | ["null", str(kind)]}:
            return {**schema, "type": kind}
    return schema


def _joined(part: Any, others: dict[Any, Any]) -> dict[str, Any] | None:
    """Both schemas as one; None if both constrain one thing, other than by equal texts, or if `part` is no object."""
    members, binding = {"properties", "additionalProperties"}, others.keys() - _NOTES
    if not isinstance(part, dict) or (members & part.keys() and members & binding):
        return None  # one of these keywords is about the other beside it
    is_apart = all(isinstance(part[key], str) and part[key] == others[key] for key in part.keys() & binding)
    return {**part, **others} if is_apart else None


def _property(name: str | None, schema: Any, *, place: str) -> Property:
    if not isinstance(schema, dict):
        raise _unsupported(place)
    kind, description = schema.get("type"), schema.get("description")
    if "enum" not in schema and kind not in ("string", "boolean", None):
        raise _unsupported(f"{place}.type")
    _check_keywords(schema, {*_NOTES, "type", "enum"}, place=place)
    values: dict[str, Any] | None = None
    if "enum" in schema:
        values = _enum_values(schema["enum"], kind=kind, place=f"{place}.enum")
    elif kind == "boolean":
        values = {"yes": True, "no": False}
    elif kind is None:
        raise _unsupported(f"{place}.type")
    is_text = isinstance(description, str) and bool(description.strip())
    return Property(name=name, description=description if is_text else None, values=values)


def _enum_values(values: Any, *, kind: Any, place: str) -> dict[str, Any]:
    """Text -> value for the values of an enum other than null; raises ApiError."""
    types = _TYPES.get(kind, ()) if isinstance(kind, str) else ((str, bool, int, float) if kind is None else ())
    values = [value for value in values if value is not None] if isinstance(values, list) else []
    if not 2 <= len(values) <= MAX_TEXTS:
        raise _unsupported(place, f"an enum has 2 to {MAX_TEXTS} values")
    if not all(isinstance(value, types) and (bool in types or not isinstance(value, bool)) for value in values):
        raise _unsupported(place, "its values are texts, numbers or booleans of its type")
    by_text = {{True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value): value for value in values}
    if len(by_text) < len(values) or not all(map(str.strip, by_text)):
        raise _unsupported(place, "its values are different and not empty")
    return by_text


def _check_keywords(schema: Mapping[str, Any], known: set[str], *, place: str) -> None:
    for keyword in schema:
        if keyword not in known:
            raise _unsupported(_inside(place, keyword))


def _inside(place: str, name: str) -> str:
    """`place.name`; only `place` if `name` does not look like a parameter, because errors never quote a text."""
    return f"{place}.{name}" if PARAMETER.fullmatch(name) else place


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _unsupported(place: str, reason: str = "an answer's properties are strings, booleans and enums") -> ApiError:
    return ApiError(f"`{place}` is not supported: {reason}.", code="unsupported_schema", param=place)
