"""What this process and its reading processes say to each other, as bytes of fixed heads. Opens nothing, sends nothing.

What comes from a reading process is not trusted: a hostile file may have taken it over. So there is nothing to parse
but one head of fixed size, every field of it is checked, and what follows is a text of bounded length or exactly the
pixels.
"""

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from app.reading.sources import FileSlice
from vision.errors import PICTURE_ERROR_CODES, PictureErrorCode
from vision.formats import shown_text

MAX_MESSAGE_BYTES = 65536
WANTED, NOT_WANTED = b"\x01", b"\x00"  # the answer to a reply of kind DIGEST

_REQUEST = struct.Struct("<IQ")  # bytes of JSON, bytes of the picture
_REPLY = struct.Struct("<BBBx32sI")  # kind, whether the digest is known, error, digest, bytes that follow
REQUEST_HEAD_BYTES, REPLY_HEAD_BYTES = _REQUEST.size, _REPLY.size
_NO_DIGEST = bytes(32)


class ReplyKind(IntEnum):
    """What a reply is."""

    READY = 1  # the process has started
    DIGEST = 2  # of the picture; it waits for WANTED or NOT_WANTED
    DONE = 3  # pixels, or an error's message, or neither: nothing was wanted but the digest


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is to be read, and in which folder; `data` are the bytes of a picture that is no file."""

    source: str | FileSlice | bytes
    name: str | None
    asks_first: bool  # whether it tells the digest and waits, before anything is decoded
    folder: str | None  # to change to before; None: stay

    def encode(self) -> tuple[bytes, bytes]:
        """The head with what describes the request, and the picture's bytes, which may be many."""
        fields: dict[str, Any] = {"name": self.name, "asks_first": self.asks_first, "folder": self.folder}
        data = b""
        match self.source:
            case bytes():
                data = self.source
            case FileSlice(path=path, offset=offset, num_bytes=num_bytes, header=header):
                fields |= {"path": path, "slice": [offset, num_bytes, header]}
            case path:
                fields["path"] = path
        # JSON keeps names that are not UTF-8: Python writes their surrogates as escapes, and reads them back.
        packed = json.dumps(fields).encode()
        return _REQUEST.pack(len(packed), len(data)) + packed, data

    @classmethod
    def decode(cls, packed: bytes, data: bytes) -> "Request":
        """From the description and the picture's bytes."""
        fields = json.loads(packed)
        source: str | FileSlice | bytes = fields.get("path", data)
        if isinstance(source, str) and "slice" in fields:
            offset, num_bytes, header = fields["slice"]
            source = FileSlice(path=source, offset=offset, num_bytes=num_bytes, header=header)
        return cls(source=source, name=fields["name"], asks_first=fields["asks_first"], folder=fields["folder"])


def request_sizes(head: bytes) -> tuple[int, int]:
    """Bytes of the description and of the picture."""
    num_packed, num_data = _REQUEST.unpack(head)
    return num_packed, num_data


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyHead:
    """The fixed part of a reply."""

    kind: ReplyKind
    digest: str  # as hex; empty when it is not known
    code: PictureErrorCode | None
    num_bytes: int  # that follow: the message where there is a code, else the pixels

    def encode(self) -> bytes:
        """The bytes."""
        code = 0 if self.code is None else 1 + PICTURE_ERROR_CODES.index(self.code)
        digest = bytes.fromhex(self.digest) or _NO_DIGEST
        return _REPLY.pack(self.kind, bool(self.digest), code, digest, self.num_bytes)

    @classmethod
    def decode(cls, head: bytes | bytearray, *, pixel_bytes: int) -> "ReplyHead":
        """Checked from beginning to end: raises ValueError for what no reading process of ours sends."""
        kind, has_digest, code, digest, num_bytes = _REPLY.unpack(head)
        is_done = kind == ReplyKind.DONE
        if kind not in ReplyKind._value2member_map_ or code > len(PICTURE_ERROR_CODES) or (code and not is_done):
            raise ValueError(f"a reply of kind {kind} with code {code}")
        if num_bytes not in ((0, pixel_bytes) if is_done else (0,)) and not (code and num_bytes <= MAX_MESSAGE_BYTES):
            raise ValueError(f"{num_bytes:,} bytes where {pixel_bytes:,} were expected")
        return cls(
            kind=ReplyKind(kind),
            digest=digest.hex() if has_digest else "",
            code=PICTURE_ERROR_CODES[code - 1] if code else None,
            num_bytes=num_bytes,
        )


def encode_message(message: str) -> bytes:
    """An error's message, cut to what fits into a reply."""
    return message.encode(errors="backslashreplace")[:MAX_MESSAGE_BYTES]


def decode_message(message: bytes | bytearray) -> str:
    """The text; never fails, and may go to a terminal: control characters are shown as escapes."""
    return shown_text(message.decode(errors="replace"))
