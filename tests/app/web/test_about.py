"""The page's head and About: which model answers and how the service is, also while there is none."""

import dataclasses
from collections.abc import Iterator

import pytest

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.online.service import Service, ServiceStatus
from llama_adapter.app.web.about_view import about, page_head, state_card

pytestmark = pytest.mark.slow

READY = ServiceStatus(
    state="ready",
    is_stalled=False,
    num_running=1,
    num_waiting=2,
    num_reading=2,
    num_slow_reading=1,
    num_encoded=3,
    restarts=0,
    last_error=None,
    uptime_s=3725.0,
)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    service = Service(Captioner.load)
    service.start()
    service.wait_until_ready(60)
    yield service
    service.close()


def test_about_tells_the_model_its_limits_and_what_it_cannot_do(service: Service) -> None:
    html = about(service)

    for words in (service.info.name, service.info.digest, service.info.device, service.info.dtype, "512 tokens"):
        assert words in html
    assert "at most 50 million pixels" in html
    assert "It knows nothing else." in html
    assert "cannot</strong> see photographs" in html


def test_the_head_tells_which_model_answers(service: Service) -> None:
    assert f"{service.info.name} on {service.info.device}" in page_head(service)
    assert "is-ready" in page_head(service)


def test_before_a_model_is_loaded_the_page_says_so() -> None:
    service = Service(Captioner.load)

    assert "no model: loading" in page_head(service)
    assert "is-ready" not in page_head(service)
    assert "The model is being loaded. Open this page again later." in about(service)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "Ready."),
        ({"state": "restarting", "restarts": 1, "last_error": "<b>It broke.</b>"}, "is being loaded anew"),
        ({"state": "restarting", "last_error": "<b>It broke.</b>"}, "&lt;b&gt;It broke.&lt;/b&gt;"),
        ({"state": "draining"}, "takes no more questions"),
        ({"state": "failed"}, "could not be loaded"),
        ({"is_stalled": True}, "has not moved for a while"),
        ({}, "1 h 2 min"),
    ],
)
def test_the_state_of_the_service_is_told_in_words(changes: dict[str, object], words: str) -> None:
    assert words in state_card(dataclasses.replace(READY, **changes))  # type: ignore[arg-type]
