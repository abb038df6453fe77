"""Messages to and from reading processes, as bytes with headers of fixed size. Plain functions.

Replies are not trusted, because a hostile file may have taken over the process. Every field of the header is checked,
and the body is a text of bounded length or exactly the pixels.
"""

import pickle
import struct
from dataclasses import dataclass, replace
from enum import IntEnum

from llama_adapter.app.pictures.reading.sources import FileSlice
from llama_adapter.runtime.text import shown_text
from llama_adapter.vision.errors import PICTURE_ERROR_CODES, PictureErrorCode
from llama_adapter.vision.formats import PICTURE_NOTES, PictureNote

MAX_MESSAGE_BYTES = 65536
WANTED, NOT_WANTED = b"\x01", b"\x00"  # the answer to a reply of kind DIGEST

_REQUEST = struct.Struct("<IQ")  # bytes of the pickled request, bytes of the picture
# Kind, whether the digest is known, error code, bits of `PICTURE_NOTES`, digest, body size in bytes, the picture's
# width and height, rows, columns.
_REPLY = struct.Struct("<BBBB32sIIIHH")
REQUEST_HEAD_BYTES, REPLY_HEAD_BYTES = _REQUEST.size, _REPLY.size
_NO_DIGEST, _NOTES_END = bytes(32), 1 << len(PICTURE_NOTES)


class ReplyKind(IntEnum):
    """The kind of a reply."""

    READY = 1  # the process has started
    DIGEST = 2  # has the picture's digest; the process then waits for WANTED or NOT_WANTED
    DONE = 3  # has pixels, or an error message, or neither if only the digest was wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The picture to read, and the folder to read it in."""

    source: str | FileSlice | bytes
    name: str | None
    asks_first: bool  # whether the process sends the digest and waits before decoding
    folder: str | None  # the current folder to change to first; None: no change
    side: int | None = None  # longest side of a view, in pixels; None: the encoder's square

    def encode(self) -> tuple[bytes, bytes]:
        """The header with the description of the request, and the picture's bytes, which may be large."""
        data = self.source if isinstance(self.source, bytes) else b""
        packed = pickle.dumps(replace(self, source=b"") if data else self)
        return _REQUEST.pack(len(packed), len(data)) + packed, data

    @staticmethod
    def decode(packed: bytes, data: bytes) -> "Request":
        """Make a request from its description and the picture's bytes. Both come from the parent and are trusted."""
        request: Request = pickle.loads(packed)
        return replace(request, source=data) if data else request


def request_sizes(head: bytes) -> tuple[int, int]:
    """Sizes in bytes of the description and of the picture."""
    num_packed, num_data = _REQUEST.unpack(head)
    return num_packed, num_data


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyHead:
    """The fixed part of a reply. The body is the message if there is a code, else the pixels."""

    kind: ReplyKind
    digest: str = ""  # hexadecimal; "" if unknown
    code: PictureErrorCode | None = None
    num_bytes: int = 0  # size of the body
    size: tuple[int, int] = (0, 0)  # width and height of the whole picture, in pixels
    notes: tuple[PictureNote, ...] = ()
    shape: tuple[int, int] = (0, 0)  # rows and columns of the pixels in the body, three bytes each

    def encode(self) -> bytes:
        """The header as bytes."""
        code = 0 if self.code is None else 1 + PICTURE_ERROR_CODES.index(self.code)
        digest = bytes.fromhex(self.digest) or _NO_DIGEST
        notes = sum(1 << place for place, note in enumerate(PICTURE_NOTES) if note in self.notes)
        return _REPLY.pack(self.kind, bool(self.digest), code, notes, digest, self.num_bytes, *self.size, *self.shape)

    @classmethod
    def decode(cls, head: bytes | bytearray, *, max_side: int) -> "ReplyHead":
        """Decode a header and check every field. Raises ValueError for values that reading processes never send.

        `max_side` is the limit for rows and columns of the pixels.
        """
        kind, has_digest, code, notes, digest, num_bytes, width, height, rows, columns = _REPLY.unpack(head)
        is_done = kind == ReplyKind.DONE
        if kind not in ReplyKind._value2member_map_ or code > len(PICTURE_ERROR_CODES) or (code and not is_done):
            raise ValueError(f"a reply of kind {kind} with code {code}")
        if code:
            is_right = num_bytes <= MAX_MESSAGE_BYTES and not (width or height or rows or columns or notes)
        elif num_bytes:
            is_right = (
                is_done and notes < _NOTES_END and num_bytes == rows * columns * 3 and max(rows, columns) <= max_side
            )
        else:
            is_right = not (width or height or rows or columns or notes)
        if not is_right:
            raise ValueError(f"{num_bytes:,} bytes for {rows:,} x {columns:,} pixels, {max_side:,} is the longest side")
        return cls(
            kind=ReplyKind(kind),
            digest=digest.hex() if has_digest else "",
            code=PICTURE_ERROR_CODES[code - 1] if code else None,
            num_bytes=num_bytes,
            size=(width, height),
            notes=tuple(note for place, note in enumerate(PICTURE_NOTES) if notes >> place & 1),
            shape=(rows, columns),
        )


def encode_message(message: str) -> bytes:
    """An error message as bytes, cut to the maximum length."""
    return message.encode(errors="backslashreplace")[:MAX_MESSAGE_BYTES]


def decode_message(message: bytes | bytearray) -> str:
    """The message as text, safe for a terminal: control characters are escaped. Never raises."""
    return shown_text(message.decode(errors="replace"))
