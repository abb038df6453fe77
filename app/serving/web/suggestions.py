"""Suggested questions of `assets/prompts.json`, filled in from a description of the picture. Imports no Gradio."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.serving.online.service import Service
from llama_adapter.app.serving.online.types import UnavailableError

_COLOURS: Final = "red|orange|yellow|green|blue|purple|white|black"
_SHAPES: Final = "circle|square|triangle|star|cross|ring|heart|moon"
_OBJECT: Final = re.compile(rf"\b({_COLOURS}) ({_SHAPES})\b")  # an object in the embedded model's words


@dataclass(frozen=True, kw_only=True, slots=True)
class Starter:
    """A suggested question and the label of its button."""

    label: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Starters:
    """The suggested questions for one kind of model."""

    prompts: tuple[Starter, ...]  # questions with free answers; the first one asks for a description
    questions: tuple[Starter, ...]  # questions that need `texts` in the boxes of options
    texts: Mapping[str, str]  # name of an option -> text for its box


def is_embedded(service: Service) -> bool:
    """Whether the service's model is the embedded one; False while no model is loaded."""
    try:
        return service.spec.is_embedded
    except UnavailableError:
        return False


def starters(*, is_embedded: bool, about: str = "") -> Starters:
    """The suggested questions for the embedded model, or for any other model.

    `about` describes the picture, for example `a red star above a blue ring`. Questions about an object need it.
    """
    kind = _prompts()["embedded" if is_embedded else "general"]
    words = _words(about)
    prompts = [(entry["label"], _filled(entry["text"], words)) for entry in kind["prompts"]]
    return Starters(
        prompts=tuple(Starter(label=label, text=text) for label, text in prompts if text),
        questions=tuple(Starter(**entry) for entry in kind["questions"]),
        texts={"choices": ", ".join(kind["choices"])},
    )


def num_named(text: str) -> int:
    """The number of drawn objects that a text names by colour and shape."""
    return len(_OBJECT.findall(text))


def _words(about: str) -> dict[str, str]:
    """Values for the placeholders in questions: an object, and shapes and a colour that only one object has."""
    objects = _OBJECT.findall(about)
    colours, shapes = ([each[place] for each in objects] for place in (0, 1))
    words = {f"shape{number}": shape for number, shape in enumerate(_single(shapes), start=1)}
    words |= {f"colour{number}": colour for number, colour in enumerate(_single(colours), start=1)}
    if objects:
        words["object"] = f"{'an' if objects[0][0] == 'orange' else 'a'} {' '.join(objects[0])}"
    return words


def _single(values: list[str]) -> list[str]:
    return [value for value in values if values.count(value) == 1]


def _filled(text: str, words: Mapping[str, str]) -> str:
    """The question with its placeholders filled in; empty if a value is missing."""
    try:
        return text.format_map(words)
    except KeyError:
        return ""


@cache
def _prompts() -> dict[str, Any]:
    prompts: dict[str, Any] = json.loads((sample_pictures().parent / "prompts.json").read_text(encoding="utf-8"))
    return prompts
