"""What a page's events and uploads may take of the server's memory and disk, whatever is sent."""

import asyncio
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from gradio import route_utils
from starlette.applications import Starlette
from starlette.datastructures import FormData, Headers
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from llama_adapter.app.online.types import ServiceLimits
from llama_adapter.app.web.page import MAX_EVENT_BYTES, page_settings
from llama_adapter.app.web.upload_parser import LEFT_FREE_BYTES, FilesOnly, files_only

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
    return asyncio.run(FilesOnly(headers, stream(), upload_dir=folder, max_file_size=5000).parse())


def test_files_are_read_as_gradio_reads_them(tmp_path: Path) -> None:
    form = parse(part(FILE, b"one") + part(FILE, b"two"), b"--edge--\r\n", folder=tmp_path)

    assert [Path(file.file.name).read_bytes() for file in form.getlist("files")] == [b"one", b"two"]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [b"files", b"other"])
def test_a_field_that_is_no_file_is_refused_before_its_content_comes(tmp_path: Path, name: bytes) -> None:
    with pytest.raises(MultiPartException, match="only files"):
        parse(part(FILE), part(b'Content-Disposition: form-data; name="' + name + b'"', b""), folder=tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_and_left_some_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=LEFT_FREE_BYTES - 1))

    with pytest.raises(MultiPartException, match="no room"):
        parse(part(FILE), folder=tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_nothing_stays_of_an_upload_that_was_broken_off(tmp_path: Path) -> None:
    with pytest.raises(ClientDisconnect):
        parse(part(FILE), part(FILE)[:200], folder=tmp_path, hangs_up=True)

    assert list(tmp_path.iterdir()) == []


def test_the_page_reads_uploads_so_and_gives_gradio_its_own_back() -> None:
    before = route_utils.GradioMultiPartParser
    with files_only():
        assert route_utils.GradioMultiPartParser is FilesOnly
    assert route_utils.GradioMultiPartParser is before


async def _echo_size(scope: Scope, receive: Receive, send: Send) -> None:
    size, is_whole = 0, False
    while not is_whole:
        message = await receive()
        size += len(message.get("body", b""))
        is_whole = not message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(size).encode()})


async def _post(path: str, size: int) -> httpx.Response:
    settings: dict[str, Any] = page_settings(SimpleNamespace(limits=ServiceLimits()))  # type: ignore[arg-type]
    application = Starlette(middleware=settings["app_kwargs"]["middleware"])
    application.mount("/", _echo_size)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://localhost") as client:
        return await client.post(path, content=bytes(size))


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/queue/join",
        "/gradio_api/queue/join/",
        "/gradio_api/run/predict",
        "/gradio_api/cancel",
        "/gradio_api/reset",
    ],
)
def test_an_event_has_so_many_bytes_at_most(path: str) -> None:
    assert asyncio.run(_post(path, MAX_EVENT_BYTES)).text == str(MAX_EVENT_BYTES)
    assert asyncio.run(_post(path, MAX_EVENT_BYTES + 1)).status_code == 413


def test_an_upload_is_not_held_in_memory_to_be_measured() -> None:
    assert asyncio.run(_post("/gradio_api/upload", MAX_EVENT_BYTES + 1)).status_code == 200
