"""Reads the picture file that an `image_url` names: a data URI or a URL at an allowed host. Decodes no picture."""

import asyncio
import binascii
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

from llama_adapter.app.pictures.inputs.urls import AllowedHost, FetchError, PictureUrl, check_allowed
from llama_adapter.app.serving.http_api.errors import PictureRefusedError, picture_too_large
from llama_adapter.runtime.given import require_above_zero, require_least

MAX_HEADER_LENGTH = 256  # characters of a data URI, including its comma
_PIECE_CHARS = 256 * 2**10
_SPACES = b" \t\r\n\f"
_STANDARD = bytes.maketrans(b"-_=", b"+/?")  # from the alphabet for URLs; padding before the end becomes an error


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureSettings:
    """Limits of a request's picture. Raises ValueError for bad numbers and hosts."""

    max_picture_bytes: int
    allowed_hosts: tuple[str, ...] = ()  # hosts to fetch pictures from, in the form of `AllowedHost.parse`
    fetch_timeout_s: float = 10.0  # from the first name lookup to the last byte
    allowed: tuple[AllowedHost, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        require_least(self, "max_picture_bytes")
        require_above_zero(self, "fetch_timeout_s")
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
        from llama_adapter.app.pictures.inputs.fetching import fetch_picture  # other servers need no HTTP client

        return await fetch_picture(
            remote, allowed=settings.allowed, max_bytes=settings.max_picture_bytes, timeout_s=settings.fetch_timeout_s
        )
    except FetchError as error:
        raise PictureRefusedError(error.message, code=error.code, status=error.http_status) from None


async def _read_data_uri(url: str, *, max_bytes: int) -> bytes:
    """The file of a data URI (RFC 2397) as clients write it. Its media type has no effect: the bytes decide."""
    comma = url.find(",", 0, MAX_HEADER_LENGTH)
    if comma < 0:
        raise PictureRefusedError(
            "A data URI starts with data:image/png;base64, and continues with the picture file in base64.",
            code="invalid_image_url",
        )
    is_base64 = url[len("data:") : comma].lower().rpartition(";")[2].strip() == "base64"
    if (size := _least_size(url, start=comma + 1, is_base64=is_base64)) > max_bytes:
        raise picture_too_large(f"{size:,} bytes", max_bytes=max_bytes)
    # In a thread: decoding a few megabytes takes milliseconds.
    content = await asyncio.to_thread(_decode, url, comma + 1, is_base64=is_base64)
    if not content:
        raise PictureRefusedError("The picture is empty.", code="empty_image_file")
    if len(content) > max_bytes:
        raise picture_too_large(f"{len(content):,} bytes", max_bytes=max_bytes)
    return content


def _least_size(url: str, *, start: int, is_base64: bool) -> int:
    """Bytes of the file after `start`, computed without decoding; if it is percent-encoded, a lower bound."""
    num_chars = len(url) - start - 2 * url.count("%", start)
    if not is_base64:
        return num_chars
    num_others = sum(url.count(one, start) for one in f"%={_SPACES.decode()}")
    return (num_chars - num_others) * 3 // 4


def _decode(url: str, start: int, *, is_base64: bool) -> bytes:
    content, left = bytearray(), b""
    with suppress(ValueError):  # malformed base64, or text beyond ASCII
        if not is_base64:
            return unquote_to_bytes(url[start:])
        if "%" in url:
            url, start = unquote_to_bytes(url[start:]).decode("ascii"), 0
        tail = url[-64:]
        end = len(url) - len(tail) + len(tail.rstrip(f"={_SPACES.decode()}"))
        for place in range(start, end, _PIECE_CHARS):
            # In pieces, because one call holds the GIL and would stall the event loop.
            piece = left + url[place : min(place + _PIECE_CHARS, end)].encode("ascii").translate(_STANDARD, _SPACES)
            num_whole = len(piece) // 4 * 4
            content += binascii.a2b_base64(piece[:num_whole], strict_mode=True)
            left = piece[num_whole:]
        content += binascii.a2b_base64(left + b"=" * (-len(left) % 4), strict_mode=True)
        return bytes(content)
    raise PictureRefusedError(
        "The base64 of the data URI is malformed: expected A-Z, a-z, 0-9, + and / (or - and _).",
        code="invalid_base64_image",
    )
