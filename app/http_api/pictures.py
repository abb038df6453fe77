"""Reads the picture file that an `image_url` names: a data URI or a URL at an allowed host. Decodes no picture."""

import asyncio
import binascii
import re
from contextlib import suppress
from dataclasses import dataclass, field

from llama_adapter.app.http_api.errors import PictureRefusedError, picture_too_large
from llama_adapter.app.inputs.urls import AllowedHost, FetchError, PictureUrl, check_allowed

MAX_HEADER_LENGTH = 256  # characters of a data URI, including its comma
_IMAGE_HEADER = re.compile(r"image/[a-z0-9][a-z0-9.+-]*(?:;[a-z0-9-]+=[a-z0-9.+-]*)*;base64")
_PIECE_CHARS = 256 * 2**10  # a multiple of 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureSettings:
    """Limits of a request's picture. Raises ValueError for bad numbers and hosts."""

    max_picture_bytes: int
    allowed_hosts: tuple[str, ...] = ()  # hosts to fetch pictures from, in the form of `AllowedHost.parse`
    fetch_timeout_s: float = 10.0  # from the first name lookup to the last byte
    allowed: tuple[AllowedHost, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.max_picture_bytes < 1:
            raise ValueError(f"max_picture_bytes must be at least 1, got {self.max_picture_bytes}")
        if not self.fetch_timeout_s > 0:
            raise ValueError(f"fetch_timeout_s must be above 0, got {self.fetch_timeout_s}")
        object.__setattr__(self, "allowed", tuple(AllowedHost.parse(entry) for entry in self.allowed_hosts))


async def read_picture(url: str, *, settings: PictureSettings) -> bytes:
    """The picture file of a data URI or a URL at an allowed host. Raises PictureRefusedError for all other URLs."""
    scheme = url[:10].partition(":")[0].lower()
    if scheme == "data":
        return await _read_data_uri(url, max_bytes=settings.max_picture_bytes)
    if scheme not in ("http", "https"):
        message = "The picture must be a data URI (data:image/png;base64,...) or an http(s) URL."
        raise PictureRefusedError(message, code="invalid_image_url")
    try:
        remote = PictureUrl.parse(url)
        check_allowed(remote, allowed=settings.allowed)
        from llama_adapter.app.inputs.fetching import fetch_picture  # other servers need no HTTP client

        return await fetch_picture(
            remote, allowed=settings.allowed, max_bytes=settings.max_picture_bytes, timeout_s=settings.fetch_timeout_s
        )
    except FetchError as error:
        raise PictureRefusedError(error.message, code=error.code, status=error.http_status) from None


async def _read_data_uri(url: str, *, max_bytes: int) -> bytes:
    comma = url.find(",", 0, MAX_HEADER_LENGTH)
    header = url[len("data:") : comma].lower() if comma >= 0 else ""
    if not header.endswith(";base64"):
        raise PictureRefusedError(
            "A data URI starts with data:image/png;base64, and continues with the picture file in base64.",
            code="invalid_image_url",
        )
    if not _IMAGE_HEADER.fullmatch(header):
        raise PictureRefusedError(
            "The media type of a picture's data URI must be image/..., such as image/png or image/jpeg.",
            code="unsupported_image_media_type",
        )
    start = comma + 1
    if start == len(url):
        raise PictureRefusedError("The picture is empty.", code="empty_image_file")
    size = _decoded_size(url, start=start)
    if size > max_bytes:
        raise picture_too_large(f"{size:,} bytes", max_bytes=max_bytes)
    # In a thread: decoding a few megabytes takes milliseconds.
    return await asyncio.to_thread(_decode, url, start)


def _decoded_size(url: str, *, start: int) -> int:
    """Bytes of the base64 text after `start`, computed without decoding."""
    num_padding = 2 - len(url[-2:].rstrip("="))
    return (len(url) - start) // 4 * 3 - num_padding


def _decode(url: str, start: int) -> bytes:
    content = bytearray()
    with suppress(ValueError):  # malformed base64, or text beyond ASCII
        for place in range(start, len(url), _PIECE_CHARS):
            # In pieces, because one call holds the GIL and would stall the event loop.
            piece = url[place : place + _PIECE_CHARS]
            if piece.endswith("=") and place + len(piece) < len(url):
                raise ValueError("padding before the end")
            content += binascii.a2b_base64(piece, strict_mode=True)
        if len(content) == _decoded_size(url, start=start):  # some Python versions accept excess padding
            return bytes(content)
    raise PictureRefusedError(
        "The base64 of the data URI is malformed: expected A-Z, a-z, 0-9, + and / with padding, no line breaks.",
        code="invalid_base64_image",
    )
