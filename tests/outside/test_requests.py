"""Requests as clients send them: each asks its question about its picture."""

import base64
import json
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from llama_adapter.app.captioning.tasks.prompts import Dialogue
from llama_adapter.app.serving.http_api.api import ApiSettings, create_api
from tests.app.serving.http_api.live import StubService

SHAPES = sorted((Path(__file__).parent / "chat-shapes").iterdir())


@pytest.mark.parametrize("file", SHAPES, ids=lambda file: file.stem)
def test_a_request_asks_its_question_about_its_picture(file: Path) -> None:
    service, body = StubService(), json.loads(file.read_text(encoding="utf-8"))
    api = TestClient(create_api(service, settings=ApiSettings()), base_url="http://localhost")  # type: ignore[arg-type]
    came = api.post("/v1/chat/completions", json=body)

    assert came.status_code == 200, came.text
    assert came.headers["x-ignored-turns"] == ("3" if file.stem == "tool-turn" else "0")
    (ask,) = service.asks
    parts = [part for message in body["messages"] for part in message["content"] or () if isinstance(part, dict)]
    (url,) = (part["image_url"]["url"] for part in parts if "image_url" in part)
    assert ask.picture == base64.b64decode(url.partition(",")[2])
    asked = ask.prompt.question if isinstance(ask.prompt, Dialogue) else ask.prompt
    assert asked == "What color is the circle?"
