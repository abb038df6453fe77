"""Uploads of files: a multipart body is written directly to disk, within limits of size, time and number."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llama_adapter.app.serving.http_api.bodies import refuse
from llama_adapter.app.serving.http_api.errors import PARAMETER, ApiError
from llama_adapter.app.serving.http_api.file_store import FileStore, NewFile, StoredFile
from llama_adapter.runtime.text import shown_text

MAX_UPLOADS: Final = 4  # concurrent uploads
UPLOAD_LIMIT_S: Final = 1800.0  # for a whole file
STALL_LIMIT_S: Final = 30.0  # for the next piece of a file
_PURPOSE: Final = "batch"
_MAX_FIELD_BYTES = 64  # size of the part `purpose`
_WRITE_BYTES = 2**20  # bytes collected before they are written


class Uploads:
    """Receives files for a store."""

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self._places = asyncio.Semaphore(MAX_UPLOADS)

    async def receive(self, request: Request, *, owner: str | None) -> StoredFile:
        """Receive and store the file of a request; raises ApiError."""
        if self._places.locked():
            message = f"{MAX_UPLOADS} uploads are under way, which is the limit: try again in a moment."
            raise ApiError(message, status=503, code="overloaded", headers={"retry-after": "1"})
        try:
            async with self._places, asyncio.timeout(UPLOAD_LIMIT_S):
                with self._store.upload(owner=owner) as file:
                    name = await _receive(request, file)
                    return await asyncio.to_thread(file.keep, name=name, purpose=_PURPOSE)
        except TimeoutError:
            message = "The file did not arrive in time."
            raise ApiError(message, status=408, code="request_timeout") from None


class RefusedUpload(Response):
    """An error response for a request whose body may not be read to its end."""

    def __init__(self, error: ApiError) -> None:
        super().__init__()
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the error, and discard the rest of the body."""
        await refuse(self._error, scope, receive, send)


async def _receive(request: Request, file: NewFile) -> str:
    """Write the part named `file` to `file`; returns the file name that the client gave. Raises ApiError."""
    form = _Form()
    try:
        parser = MultipartParser(_boundary(request.headers), form.callbacks())
        async for piece in _pieces(request):
            parser.write(piece)
            if form.num_pending >= _WRITE_BYTES:
                await asyncio.to_thread(file.write, form.take())
        parser.finalize()
    except FormParserError:
        raise ApiError("The multipart body is malformed.") from None
    await asyncio.to_thread(file.write, form.take())
    if not form.is_whole or form.file_name is None:
        raise ApiError("`file` is missing.", code="missing_required_parameter", param="file")
    if form.purpose.decode("utf-8", "replace") != _PURPOSE:
        raise ApiError(f"`purpose` must be {_PURPOSE}.", param="purpose")
    return form.file_name


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    stream = request.stream()
    while True:
        async with asyncio.timeout(STALL_LIMIT_S):
            piece = await anext(stream, None)
        if piece is None:
            return
        yield piece


def _boundary(headers: Headers) -> bytes:
    kind, options = parse_options_header(headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        message = "A file is uploaded as multipart/form-data, with the parts `file` and `purpose`."
        raise ApiError(message, status=415, code="unsupported_media_type")
    return options[b"boundary"]


class _Form:
    """The parts of a body. The parser's callbacks fill it."""

    def __init__(self) -> None:
        self.file_name: str | None = None
        self.purpose = b""
        self.is_whole = False
        self.num_pending = 0
        self._pending: list[bytes] = []  # bytes of the file that are not taken yet
        self._headers: dict[bytes, bytes] = {}
        self._header, self._value = b"", b""
        self._part = b""  # name of the current part

    def callbacks(self) -> Any:
        """The callbacks for the parser."""
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": self._take_header,
            "on_header_value": self._take_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._take_data,
            "on_end": self._end,
        }

    def take(self) -> bytes:
        """The bytes of the file that came since the last call."""
        data = b"".join(self._pending)
        self._pending.clear()
        self.num_pending = 0
        return data

    def _begin_part(self) -> None:
        self._headers.clear()

    def _take_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header, self._value = b"", b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._part = options.get(b"name", b"")
        if self._part == b"file" and self.file_name is None:
            # Only the last component of a path, with / or \ as separator; control characters are escaped.
            name = options.get(b"filename", b"").decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
            self.file_name = shown_text(name) or "file.jsonl"
        elif self._part != b"purpose":
            name = self._part.decode("utf-8", "replace")
            is_shown = PARAMETER.fullmatch(name.replace("[", "").replace("]", ""))  # as in expires_after[seconds]
            message = f"Unknown part{f' `{name}`' if is_shown else ''}, or a second one."
            raise ApiError(message, code="unknown_parameter", param=name if is_shown else None)

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._part == b"file":
            self._pending.append(data[start:end])
            self.num_pending += end - start
        else:
            self.purpose += data[start:end]
            if len(self.purpose) > _MAX_FIELD_BYTES:
                raise ApiError(f"`purpose` must be {_PURPOSE}.", param="purpose")

    def _end(self) -> None:
        self.is_whole = True
