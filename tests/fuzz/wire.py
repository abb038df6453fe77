"""Messages of a reading process: any head of fixed size is refused, or can be encoded again unchanged."""

import struct

from llama_adapter.app.pictures.reading.sources import FileSlice
from llama_adapter.app.pictures.reading.wire import (
    MAX_MESSAGE_BYTES,
    REPLY_HEAD_BYTES,
    REQUEST_HEAD_BYTES,
    ReplyHead,
    ReplyKind,
    Request,
    decode_message,
    request_sizes,
)
from llama_adapter.runtime.text import UNSAFE_ON_TERMINALS
from llama_adapter.vision.errors import PICTURE_ERROR_CODES
from tests.fuzz.mutators import mutated_bytes
from tests.fuzz.target import Target, refused

SIDE = 224
PIXEL_BYTES = SIDE * SIDE * 3


def reply(data: bytes) -> str:
    """The head of a reading process's reply, and the following bytes as its message."""
    head, rest = data[:REPLY_HEAD_BYTES].ljust(REPLY_HEAD_BYTES, b"\0"), data[REPLY_HEAD_BYTES:]
    shown = decode_message(rest)
    assert not UNSAFE_ON_TERMINALS.search(shown)
    try:
        said = ReplyHead.decode(head, max_side=SIDE)
    except ValueError as error:
        return refused(error)
    assert ReplyHead.decode(said.encode(), max_side=SIDE) == said
    assert said.num_bytes <= (PIXEL_BYTES if said.code is None else MAX_MESSAGE_BYTES)
    assert len(said.digest) in (0, 64)
    return f"ok {said.kind.name} {said.code}"


def request(data: bytes) -> str:
    """A request to a reading process, built from these bytes, is received as it was sent."""
    name = data[:200].decode(errors="surrogateescape")
    offset, size = struct.unpack("<QQ", data[-16:].rjust(16, b"\0"))
    sources = (name, data, FileSlice(path=name, offset=offset, num_bytes=size, header=size & 0xFFFFFFFF))
    for source in sources:
        sent = Request(
            source=source,
            name=name or None,
            asks_first=bool(size & 1),
            folder=name if size & 2 else None,
            side=size & 1023 if size & 4 else None,
        )
        head, body = sent.encode()
        assert request_sizes(head[:REQUEST_HEAD_BYTES]) == (len(head) - REQUEST_HEAD_BYTES, len(body))
        assert Request.decode(head[REQUEST_HEAD_BYTES:], body) == sent
    return f"ok {len(data).bit_length()}"


def _replies() -> dict[str, bytes]:
    heads = {
        "ready": ReplyHead(kind=ReplyKind.READY),
        "digest": ReplyHead(kind=ReplyKind.DIGEST, digest="ab" * 32),
        "pixels": ReplyHead(
            kind=ReplyKind.DONE, digest="cd" * 32, num_bytes=PIXEL_BYTES, size=(640, 480), shape=(SIDE, SIDE)
        ),
        **{code: ReplyHead(kind=ReplyKind.DONE, code=code, num_bytes=7) for code in PICTURE_ERROR_CODES},
    }
    return {name: head.encode() + "né\x1b[1m\ud7ff".encode() for name, head in heads.items()}


_TEXTS = {"name": "bilder/été.png".encode(), "bytes": bytes(range(256)), "not-utf-8": b"\xff\xfe.png"}
TARGETS = (
    Target("wire-reply", reply, _replies, mutated_bytes(), max_bytes=4096),
    Target("wire-request", request, lambda: _TEXTS, mutated_bytes(b"\xed\xa0\x80", b'"', b"\\", b"\0"), max_bytes=4096),
)
