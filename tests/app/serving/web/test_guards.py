"""The guards around Gradio: which routes are open, what a failed event writes into the log, the limits of uploads."""

import asyncio
import inspect
import logging
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gradio as gr
import httpx
import pytest
from gradio import route_utils
from gradio.component_meta import create_or_modify_pyi
from starlette.applications import Starlette
from starlette.datastructures import FormData, Headers
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from llama_adapter.app.serving.http_api.guards import MAX_SEPARATORS
from llama_adapter.app.serving.web import guards, no_stub_files
from llama_adapter.app.serving.web.guards import (
    LEFT_FREE_BYTES,
    MAX_EVENT_BYTES,
    MAX_FAULT_LINES_A_MINUTE,
    BoundedUploads,
    ClosedRoutes,
    FaultLog,
    GuardedBlocks,
    add_page_guards,
    bounded_uploads,
    is_open,
)
from llama_adapter.app.serving.web.uploads import private_uploads
from tests.app.serving.http_api.asgi import Application, Client

SENT = "what was sent \x1b[31m\n"

# Routes


@pytest.mark.parametrize("line", Path(__file__).with_name("routes.txt").read_text().splitlines())
def test_what_the_page_needs_is_open_and_the_rest_is_closed(line: str) -> None:
    state, method, path = line.split(" ", 2)
    assert is_open(method, path) == (state == "open")


def ask(method: str, path: str, *, root_path: str = "", **headers: str) -> tuple[Client, bool]:
    """A request and its response, and whether this came from Gradio."""
    gradio = Application(x_content_type_options="none")
    options = {"root_path": root_path, "content_type": "", **headers}
    return Client(method=method, path=path, **options).ask(ClosedRoutes(gradio)), bool(gradio.bodies)


def test_paths_are_those_below_the_mount() -> None:
    assert ask("GET", "/ui/theme.css", root_path="/ui")[0].status == 200
    answer, has_reached = ask("GET", "/ui/monitoring", root_path="/ui")
    assert (answer.status, has_reached) == (404, False)
    assert b"/v1/" in answer.sent[-1]["body"]  # clients of other interfaces, such as Ollama's, ask here


HOST = "127.0.0.1:7860"


@pytest.mark.parametrize(
    "request_line", ["GET /config", "GET /", "POST /gradio_api/queue/join", "POST /gradio_api/upload"]
)
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({}, 200),
        ({"sec_fetch_site": "same-origin"}, 200),
        ({"sec_fetch_site": "same-origin", "origin": "https://the-proxy.example"}, 200),
        ({"sec_fetch_site": "none"}, 200),
        ({"sec_fetch_site": "same-site"}, 403),
        ({"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"}, 403),
        ({"origin": f"http://{HOST}"}, 200),
        ({"origin": "https://the-proxy.example", "x_forwarded_host": "the-proxy.example"}, 200),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"origin": "http://localhost:7860"}, 403),
        ({"origin": "http://127.0.0.1"}, 403),
        ({"origin": "https://127.0.0.1:7860.example"}, 403),
        ({"origin": "null"}, 403),
    ],
)
def test_a_page_of_another_origin_can_neither_read_nor_send(
    request_line: str, sent: dict[str, str], status: int
) -> None:
    answer, has_reached = ask(*request_line.split(), host=HOST, **sent)

    assert (answer.status, has_reached) == (status, status == 200)
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("request_line", ["GET /config", "POST /gradio_api/upload"])
def test_an_empty_origin_is_another_one(request_line: str) -> None:
    method, path = request_line.split()
    client = Client(method=method, path=path, host=HOST, content_type="")
    client.scope["headers"].append((b"origin", b""))

    assert client.ask(ClosedRoutes(Application())).status == 403


def test_a_link_on_another_page_opens_the_page_but_a_form_there_sends_nothing() -> None:
    headers = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert ask("GET", "/", **headers)[0].status == 200
    assert ask("POST", "/gradio_api/upload", **headers)[0].status == 403


@pytest.mark.parametrize("path", ["/", "/monitoring"])
def test_every_answer_keeps_the_page_to_itself(path: str) -> None:
    headers = ask("GET", path)[0].headers

    assert "default-src 'self'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "http" not in headers["content-security-policy"], "no other server is named"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["referrer-policy"] == "no-referrer"


# Failed events


def outcome(error: Exception, values: list[Any]) -> gr.Error:
    """The error that the page raises if a handler raises `error` for an event with these values."""

    def handle(text: str) -> str:
        raise error

    async def process() -> None:
        with GuardedBlocks() as page:  # in a running event loop; otherwise Gradio opens one and never closes it
            box = gr.Textbox()
            box.input(handle, box, box)
        await page.process_api(page.fns[0], values)

    with pytest.raises(gr.Error) as caught:
        asyncio.run(process())
    return caught.value


def test_no_file_outside_the_uploads_is_given_out() -> None:
    async def process(path: str) -> None:
        with GuardedBlocks() as page:
            box, file = gr.Textbox(), gr.File()
            box.input(lambda text: path, box, file)
        await page.process_api(page.fns[0], [SENT])

    with private_uploads() as folder:
        (folder / "own.txt").write_text("x")
        asyncio.run(process(str(folder / "own.txt")))
        with pytest.raises(gr.Error):
            asyncio.run(process("/etc/passwd"))


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("llama_adapter"), "propagate", True)
    caplog.set_level(logging.ERROR, "llama_adapter")
    return caplog


@pytest.mark.parametrize("values", [[SENT], []], ids=["the handler fails", "too few values"])
def test_a_fault_is_one_line_without_what_was_sent(values: list[Any], lines: pytest.LogCaptureFixture) -> None:
    error = outcome(KeyError(SENT), values)

    assert error.print_exception is False
    assert error.message is None, "the reply has no message, as Gradio's own"
    (line,) = lines.messages
    assert line.startswith(("page: an event failed: KeyError in handle (", "page: an event failed: ValueError in "))
    assert line.isprintable()
    assert "what was sent" not in line


@pytest.mark.parametrize("is_logged", [True, False])
def test_a_message_for_users_stays_and_is_not_printed(is_logged: bool, lines: pytest.LogCaptureFixture) -> None:
    error = outcome(gr.Error(SENT, print_exception=is_logged), [SENT])

    assert (error.message, error.print_exception) == (SENT, False)
    assert len(lines.messages) == is_logged
    assert "what was sent" not in lines.text


def test_many_faults_are_counted(lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [6000.0]
    # Only this module's clock, because the event loops of other tests' servers also read `time.monotonic`.
    monkeypatch.setattr(guards, "time", SimpleNamespace(monotonic=lambda: now[0]))
    faults = FaultLog()
    for _ in range(MAX_FAULT_LINES_A_MINUTE + 7):
        faults.tell(ValueError(SENT))
    assert len(lines.messages) == MAX_FAULT_LINES_A_MINUTE

    now[0] += 60
    faults.tell(ValueError(SENT))
    assert lines.messages[MAX_FAULT_LINES_A_MINUTE].startswith("page: 7 more events failed")
    assert len(lines.messages) == MAX_FAULT_LINES_A_MINUTE + 2


# Uploads and event bodies

FILE = b'Content-Disposition: form-data; name="files"; filename="star.png"'


def part(head: bytes, content: bytes = b"a" * 1000) -> bytes:
    return b"--edge\r\n" + head + b"\r\n\r\n" + content + b"\r\n"


def parse(*pieces: bytes, folder: Path, hangs_up: bool = False) -> FormData:
    async def stream() -> AsyncGenerator[bytes]:
        for piece in pieces:
            yield piece
        if hangs_up:
            raise ClientDisconnect

    headers = Headers({"content-type": "multipart/form-data; boundary=edge"})
    with bounded_uploads():
        parser = route_utils.GradioMultiPartParser
        assert parser is BoundedUploads
        return asyncio.run(parser(headers, stream(), upload_dir=folder, max_file_size=5000).parse())


def test_files_are_read_as_gradio_reads_them(tmp_path: Path) -> None:
    form = parse(part(FILE, b"one") + part(FILE, b"two"), b"--edge--\r\n", folder=tmp_path)

    assert [Path(file.file.name).read_bytes() for file in form.getlist("files")] == [b"one", b"two"]  # type: ignore[union-attr]
    assert route_utils.GradioMultiPartParser is not BoundedUploads


def field(name: bytes) -> bytes:
    return part(b'Content-Disposition: form-data; name="' + name + b'"', b"")


@pytest.mark.parametrize(
    ("pieces", "free", "told"),
    [
        ((part(FILE), field(b"files")), LEFT_FREE_BYTES, "only files"),
        ((part(FILE), field(b"other")), LEFT_FREE_BYTES, "only files"),
        ((part(FILE),), LEFT_FREE_BYTES - 1, "no room"),
        ((part(FILE), part(FILE)[:200]), LEFT_FREE_BYTES, None),
    ],
)
def test_nothing_stays_of_an_upload_that_is_refused_or_breaks_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: tuple[bytes, ...], free: int, told: str | None
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))

    with pytest.raises(MultiPartException if told else ClientDisconnect, match=told):
        parse(*pieces, folder=tmp_path, hangs_up=told is None)
    assert list(tmp_path.iterdir()) == []


def test_old_uploads_are_deleted_though_one_came_in_between(tmp_path: Path) -> None:
    (old := tmp_path / "old.png").touch()
    uploads = mock.MagicMock()
    uploads.__iter__.side_effect = [RuntimeError("Set changed size during iteration"), iter([str(old)])]
    with bounded_uploads():
        for is_there in (True, False):
            route_utils.delete_files_created_by_app(SimpleNamespace(blocks={}, temp_file_sets=[uploads]), None)  # type: ignore[arg-type]
            assert old.exists() == is_there


def post(path: str, size: int, *, of: bytes = b"\0") -> httpx.Response:
    """The answer to a body of this size, by an application that answers with the size it got."""

    async def told(request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(len(await request.body())))

    application = Starlette(routes=[Route("/{path:path}", told, methods=["POST"])])
    add_page_guards(application)
    return TestClient(application, base_url="http://localhost").post(path, content=of * size)


@pytest.mark.parametrize("path", ["queue/join", "queue/join/", "run/predict", "cancel", "reset"])
def test_the_body_of_an_event_is_bounded(path: str) -> None:
    assert post(f"/gradio_api/{path}", MAX_EVENT_BYTES).text == str(MAX_EVENT_BYTES)
    assert post(f"/gradio_api/{path}", MAX_EVENT_BYTES + 1).status_code == 413
    assert post(f"/gradio_api/{path}", MAX_SEPARATORS + 1, of=b"[").status_code == 400


def test_an_upload_is_not_held_in_memory_to_be_measured() -> None:
    assert post("/gradio_api/upload", MAX_EVENT_BYTES + 1).status_code == 200


# Import


def test_no_stub_files_are_written_and_other_sources_are_found() -> None:
    with mock.patch.object(Path, "read_text", side_effect=AssertionError("a stub file is made")):
        with no_stub_files():
            create_or_modify_pyi(gr.Button, "Button", [])
            assert inspect.getfile(Path) == str(Path(inspect.__file__).with_name("pathlib.py"))
        with pytest.raises(AssertionError, match="a stub file"):  # otherwise this test would prove nothing
            create_or_modify_pyi(gr.Button, "Button", [])
