"""Of all that Gradio serves, the page's own needs are answered and the rest is not."""

import asyncio
from typing import Any

import pytest

from llama_adapter.app.web.closed_routes import ClosedRoutes, is_open


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("HEAD", "/"),
        ("GET", "/assets/index.js"),
        ("GET", "/static/img/logo.svg"),
        ("GET", "/theme.css"),
        ("GET", "/gradio_api/file=/uploads/abc/a picture.png"),
        ("GET", "/gradio_api/queue/data"),
        ("GET", "/gradio_api/heartbeat/abc"),
        ("POST", "/gradio_api/queue/join"),
        ("POST", "/gradio_api/upload"),
        ("POST", "/gradio_api/run/predict"),
    ],
)
def test_what_the_page_needs_is_open(method: str, path: str) -> None:
    assert is_open(method, path)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/gradio_api/file=http://example.com/a.png"),
        ("GET", "/gradio_api/file=https%3A%2F%2Fexample.com/a.png"),
        ("GET", "/gradio_api/file=https%253A%252F%252Fexample.com/a.png"),
        ("GET", "/file=/etc/passwd"),
        ("GET", "/gradio_api/proxy=https://example.com"),
        ("GET", "/gradio_api/deep_link"),
        ("GET", "/gradio_api/info"),
        ("GET", "/gradio_api/openapi.json"),
        ("GET", "/gradio_api/vibe-code"),
        ("GET", "/monitoring"),
        ("GET", "/docs"),
        ("GET", "/gradio_api/runs"),
        ("POST", "/gradio_api/process_recording"),
        ("POST", "/gradio_api/component_server"),
        ("POST", "/gradio_api/call/ask"),
        ("POST", "/login"),
        ("POST", "/"),
        ("DELETE", "/"),
        ("PUT", "/gradio_api/upload"),
    ],
)
def test_the_rest_is_closed(method: str, path: str) -> None:
    assert not is_open(method, path)


def ask(
    method: str, path: str, *, headers: tuple[tuple[bytes, bytes], ...] = (), root: str = ""
) -> tuple[int, dict[bytes, bytes], bool]:
    """Status and headers of an answer, and whether Gradio gave it."""
    reached: list[str] = []
    sent: list[Any] = []

    async def gradio(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-content-type-options", b"none")]})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Any:
        raise AssertionError("nothing reads the body")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "root_path": root, "headers": list(headers)}
    asyncio.run(ClosedRoutes(gradio)(scope, receive, send))
    return sent[0]["status"], dict(sent[0]["headers"]), bool(reached)


def test_paths_are_those_below_the_mount() -> None:
    assert ask("GET", "/ui/theme.css", root="/ui")[0] == 200
    assert ask("GET", "/ui/monitoring", root="/ui")[0] == 404


def test_a_page_of_another_site_cannot_post() -> None:
    def posted(*headers: tuple[bytes, bytes]) -> int:
        return ask("POST", "/gradio_api/queue/join", headers=headers)[0]

    assert posted((b"sec-fetch-site", b"cross-site")) == 403
    assert posted((b"sec-fetch-site", b"same-site")) == 403
    assert posted((b"sec-fetch-site", b"same-origin")) == 200
    assert posted() == 200


@pytest.mark.parametrize("path", ["/", "/monitoring"])
def test_every_answer_keeps_the_page_to_itself(path: str) -> None:
    _, headers, _ = ask("GET", path)

    assert b"default-src 'self'" in headers[b"content-security-policy"]
    assert b"frame-ancestors 'none'" in headers[b"content-security-policy"]
    assert b"http" not in headers[b"content-security-policy"], "no other server is named"
    assert headers[b"x-content-type-options"] == b"nosniff"
    assert headers[b"referrer-policy"] == b"no-referrer"


def test_what_is_closed_does_not_reach_gradio() -> None:
    assert ask("GET", "/monitoring") == (404, ask("GET", "/monitoring")[1], False)
