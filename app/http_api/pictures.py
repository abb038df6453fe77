"""The `image_url` of a request -> the bytes of a picture's file, bounded before they are made; decodes no picture."""

import asyncio
import binascii
import re
from contextlib import suppress
from dataclasses import dataclass, field

from llama_adapter.app.http_api.addresses import AllowedHost, PictureUrl, check_allowed, shown_url
from llama_adapter.app.http_api.picture_errors import (
    PictureRefusedError as PictureRefusedError,  # for callers of this module
)

MAX_HEADER_LENGTH = 256  # of a data URI, up to its comma
_IMAGE_HEADER = re.compile(r"image/[a-z0-9][a-z0-9.+-]*(?:;[a-z0-9-]+=[a-z0-9.+-]*)*;base64")

_PIECE_CHARS = 256 * 2**10  # whole groups of 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureSettings:
    """What pictures of requests may be. Raises ValueError for an entry of `allowed_hosts` that makes no sense."""

    max_picture_bytes: int
    allowed_hosts: tuple[str, ...] = ()  # whose pictures are fetched: see `AllowedHost.parse`
    fetch_timeout_s: float = 10.0  # from the first name looked up to the last byte
    allowed: tuple[AllowedHost, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.max_picture_bytes < 1:
            raise ValueError(f"max_picture_bytes must be at least 1, got {self.max_picture_bytes}")
        if not self.fetch_timeout_s > 0:
            raise ValueError(f"fetch_timeout_s must be above 0, got {self.fetch_timeout_s}")
        object.__setattr__(self, "allowed", tuple(AllowedHost.parse(entry) for entry in self.allowed_hosts))


async def read_picture(url: str, *, settings: PictureSettings) -> bytes:
    """The bytes of a data URI or, of an allowed host, of a remote picture; nothing else is ever opened.

    Raises PictureRefusedError.
    """
    scheme = url[:10].partition(":")[0].lower()
    if scheme == "data":
        return await _read_data_uri(url, max_bytes=settings.max_picture_bytes)
    if scheme not in ("http", "https"):
        raise PictureRefusedError(
            f"A picture is sent as a data URI (data:image/png;base64,...), got {shown_url(url[:MAX_HEADER_LENGTH])}.",
            code="invalid_image_url",
        )
    remote = PictureUrl.parse(url)
    check_allowed(remote, allowed=settings.allowed)
    from llama_adapter.app.http_api.fetching import fetch_picture  # only a server that fetches needs an HTTP client

    return await fetch_picture(
        remote, allowed=settings.allowed, max_bytes=settings.max_picture_bytes, timeout_s=settings.fetch_timeout_s
    )


async def _read_data_uri(url: str, *, max_bytes: int) -> bytes:
    comma = url.find(",", 0, MAX_HEADER_LENGTH)
    header = url[len("data:") : comma].lower() if comma >= 0 else ""
    if not header.endswith(";base64"):
        raise PictureRefusedError(
            "A data URI begins as data:image/png;base64, and goes on with the picture's bytes in base64.",
            code="invalid_image_url",
        )
    if not _IMAGE_HEADER.fullmatch(header):
        raise PictureRefusedError(
            "The media type of a picture's data URI is image/..., such as image/png or image/jpeg.",
            code="unsupported_image_media_type",
        )
    start = comma + 1
    if start == len(url):
        raise PictureRefusedError("The picture has no bytes.", code="empty_image_file")
    size = _decoded_size(url, start=start)
    if size > max_bytes:
        raise too_large(f"has {size:,} bytes", max_bytes=max_bytes)
    # A few megabytes take milliseconds, in which the event loop serves others.
    return await asyncio.to_thread(_decode, url, start)


def _decoded_size(url: str, *, start: int) -> int:
    """Bytes that the base64 text from `start` on stands for, counted without decoding it."""
    num_padding = 2 - len(url[-2:].rstrip("="))
    return (len(url) - start) // 4 * 3 - num_padding


def _decode(url: str, start: int) -> bytes:
    content = bytearray()
    with suppress(ValueError):  # of damaged base64, or of text beyond ASCII
        for place in range(start, len(url), _PIECE_CHARS):
            # In pieces, since a call holds Python's lock and with it the event loop.
            piece = url[place : place + _PIECE_CHARS]
            if piece.endswith("=") and place + len(piece) < len(url):
                raise ValueError("padding before the end")
            content += binascii.a2b_base64(piece, strict_mode=True)
        if len(content) == _decoded_size(url, start=start):  # some versions of Python take more padding than is right
            return bytes(content)
    raise PictureRefusedError(
        "The data URI's base64 is damaged: A-Z, a-z, 0-9, + and / with padding are expected, no line breaks.",
        code="invalid_base64_image",
    )


def too_large(came: str, *, max_bytes: int) -> PictureRefusedError:
    """The refusal of a picture of too many bytes; `came` says how many there are."""
    return PictureRefusedError(
        f"A picture has at most {max_bytes:,} bytes here, this one {came}: send a smaller one.",
        code="image_file_too_large",
        status=413,
    )
