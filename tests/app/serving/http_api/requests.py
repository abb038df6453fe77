"""Chat requests for tests, as JSON values."""

import base64
from typing import Any

from llama_adapter.app.models.resources import sample_pictures

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
# A red square, 16 pixels wide.
EXAMPLE_PICTURE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQAQMAAAAlPW0iAAAABlBMVEWWlpbcHh4C6O6xAAAAFElEQVR42mNgQAL8H5gYGDARMgAAI20BDofI/jkAAAAASUVORK5CYII="
)
RED_STAR = sample_pictures() / "12-red-star.jpg"


def data_uri(picture: bytes, *, kind: str = "jpeg") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"


def image(url: str = EXAMPLE_PICTURE) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts: dict[str, Any] | str) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts],
    }


def chat(*messages: dict[str, Any], **parameters: Any) -> dict[str, Any]:
    """A complete request; by default a question about a red square."""
    return {"model": "default", "messages": list(messages) or [user(image(), "What color is it?")], **parameters}


def json_schema(properties: dict[str, Any]) -> dict[str, Any]:
    """A `response_format` for an object with these properties, all required."""
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
