"""The page's named endpoints, called with `gradio_client` over real HTTP."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError

from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.serving.online.service import ServiceLimits
from tests.app.serving.web.browser import serve_page

pytestmark = pytest.mark.slow

STAR = sample_pictures() / "12-red-star.jpg"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serve_page(limits=ServiceLimits(max_picture_bytes=100_000, max_prompt_chars=100)) as page:
        yield Client(page.url, verbose=False)


def test_the_named_endpoints_are_the_only_ones(client: Client) -> None:
    told: Any = client.view_api(print_info=False, return_format="dict")

    assert told["unnamed_endpoints"] == {}
    assert {
        name: [one["parameter_name"] for one in endpoint["parameters"]]
        for name, endpoint in told["named_endpoints"].items()
    } == {"/ask": ["picture", "question"], "/caption": ["picture"]}
    shown = [one["api_name"] for one in client.config["dependencies"] if one["api_visibility"] != "private"]
    assert sorted(shown) == ["ask", "caption"]


def test_a_picture_is_described_and_asked_about(client: Client) -> None:
    caption = client.predict(handle_file(STAR), api_name="/caption")

    assert "red star" in caption
    assert client.predict(picture=handle_file(STAR), question=" ", api_name="/ask") == caption
    assert client.predict(handle_file(STAR), "What color is the star?", api_name="/ask") == "red"


@pytest.mark.parametrize(
    ("picture", "question", "told"),
    [
        ("/etc/passwd", "What?", "Wanted a picture as `handle_file"),
        ({"path": "/etc/passwd"}, "What?", "Only files uploaded on this page"),
        ({"path": "https://example.com/a.png"}, "What?", "Only files uploaded on this page"),
        (handle_file(STAR), 5, "Wanted a picture as `handle_file"),
        (handle_file(STAR), "x" * 101, "100 is the limit"),
    ],
)
def test_other_values_are_refused_in_a_sentence(client: Client, picture: Any, question: Any, told: str) -> None:
    with pytest.raises(AppError, match=told):
        client.predict(picture, question, api_name="/ask")


def test_files_are_refused_as_on_the_page(client: Client, tmp_path: Path) -> None:
    for data, told in ((b"text", "looks like plain text"), (b"x" * 100_001, "Wanted at most 100,000 bytes")):
        (tmp_path / "file.png").write_bytes(data)
        with pytest.raises(AppError, match=told):
            client.predict(handle_file(tmp_path / "file.png"), api_name="/caption")
