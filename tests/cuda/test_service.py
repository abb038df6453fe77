"""Requests answered on a GPU. The chat request needs the packages of `serve`; a machine with a GPU may lack fastapi."""

import json
from collections.abc import Iterator

import pytest

from llama_adapter.app.captioning.captioner import Captioner, TextDelta
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.serving.online.service import Ask, Service
from tests.app.serving.web.browser import Gate
from tests.cuda.device import DEVICE, GRAPHS, loaded

CAPTION = "Generate caption of this image"
PICTURE = sample_pictures() / "12-red-star.jpg"


@pytest.fixture(scope="module")
def gate() -> Gate:
    return Gate()


@pytest.fixture(scope="module")
def service(gate: Gate) -> Iterator[Service]:
    service = Service(lambda: Captioner.load(device=DEVICE, dtype="float32", mode=GRAPHS), observer=gate)
    service.start()
    service.wait_until_ready(120)
    yield service
    service.close()


def test_a_cancelled_request_ends_and_the_next_one_is_answered(service: Service, gate: Gate) -> None:
    gate.close()
    handle = service.submit(Ask(picture=PICTURE.read_bytes(), prompt=CAPTION))
    first = next(handle.events())
    handle.cancel()
    gate.open()
    answer, expected = handle.result(), loaded("cpu").caption(PICTURE)

    assert isinstance(first, TextDelta)
    assert answer.error is not None
    assert answer.error.code == "cancelled"
    assert len(answer.text) < len(expected.text)
    again = service.submit(Ask(picture=PICTURE.read_bytes(), prompt=CAPTION)).result()
    assert again.token_ids == expected.token_ids


def test_a_chat_request_is_streamed(service: Service) -> None:
    pytest.importorskip("fastapi", reason="no fastapi beside this GPU")
    from tests.app.serving.http_api.live import client_of
    from tests.app.serving.http_api.requests import chat, data_uri, image, user

    asked = chat(user(image(data_uri(PICTURE.read_bytes())), CAPTION), stream=True)
    with client_of(service) as client:  # type: ignore[arg-type]
        reply = client.post("/v1/chat/completions", json=asked)

    assert reply.status_code == 200, reply.text
    *chunks, end = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    pieces = [choice["delta"].get("content", "") for chunk in chunks for choice in json.loads(chunk)["choices"]]
    assert end == "[DONE]"
    assert len(pieces) > 3
    assert "".join(pieces) == loaded("cpu").caption(PICTURE).text
