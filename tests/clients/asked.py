"""What the Python programs ask: a picture as a data URL, two questions, two schemas. Read from stdin as JSON."""

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, Field

_given = json.load(sys.stdin)
URL: str = _given["url"]  # address of the server, ending in /v1
PICTURE: str = _given["picture"]
CAPTION: str = _given["caption"]
QUESTION: str = _given["question"]
LOOK = "Look."  # asked with a schema; each property of it has its own question


class Scene(BaseModel):
    """A schema that the server can answer."""

    color: Literal["red", "yellow", "green"] = Field(description="What color is the moon?")
    has_cross: bool = Field(description="Is there a green cross?")
    caption: str = Field(description=CAPTION)


class Count(BaseModel):
    """A schema that guides the answer token by token."""

    number: int = Field(ge=0, le=9)


def refusal(error: type[Exception], ask: Callable[..., Any], *given: Any, **settings: Any) -> str:
    """The message of the error that the client raises, or a text that begins with "answered"."""
    try:
        return f"answered: {ask(*given, **settings)}"
    except error as refused:
        return getattr(refused, "message", None) or str(refused)


def chat_messages(text: str) -> list[Any]:
    """A question about the picture, in the form of chat completions."""
    picture = {"type": "image_url", "image_url": {"url": PICTURE}}
    return [{"role": "user", "content": [{"type": "text", "text": text}, picture]}]


def response_items(text: str) -> list[Any]:
    """A question about the picture, in the form of responses."""
    picture = {"type": "input_image", "image_url": PICTURE, "detail": "auto"}
    return [{"role": "user", "content": [{"type": "input_text", "text": text}, picture]}]
