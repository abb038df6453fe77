"""Reads the picture file of a data URI. Decodes no picture."""

import binascii
from contextlib import suppress
from typing import Final
from urllib.parse import unquote_to_bytes

from llama_adapter.app.pictures.inputs.urls import FetchError, too_large

SCHEME: Final = "data:"
MAX_HEADER_LENGTH = 256  # characters of a data URI, including its comma
_PIECE_CHARS = 256 * 2**10
_SPACES = b" \t\r\n\f"
_STANDARD = bytes.maketrans(b"-_=", b"+/?")  # from the alphabet for URLs; padding before the end becomes an error


def is_data_uri(url: str) -> bool:
    """Whether a text begins as a data URI."""
    return url[: len(SCHEME)].lower() == SCHEME


def read_data_uri(url: str, *, max_bytes: int) -> bytes:
    """The file of a data URI (RFC 2397) as clients write it. Its media type has no effect: the bytes decide.

    Raises FetchError for a malformed URI, an empty file and one of more than `max_bytes`.
    """
    comma = url.find(",", 0, MAX_HEADER_LENGTH)
    if comma < 0:
        raise FetchError(
            "A data URI starts with data:image/png;base64, and continues with the picture file in base64.",
            code="invalid_image_url",
        )
    is_base64 = url[len(SCHEME) : comma].lower().rpartition(";")[2].strip() == "base64"
    if (size := _least_size(url, start=comma + 1, is_base64=is_base64)) > max_bytes:
        raise too_large(f"{size:,} bytes", max_bytes=max_bytes)
    content = _decode(url, comma + 1, is_base64=is_base64)
    if not content:
        raise FetchError("The picture is empty.", code="empty_image_file")
    if len(content) > max_bytes:
        raise too_large(f"{len(content):,} bytes", max_bytes=max_bytes)
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
    raise FetchError(
        "The base64 of the data URI is malformed: expected A-Z, a-z, 0-9, + and / (or - and _).",
        code="invalid_base64_image",
    )
