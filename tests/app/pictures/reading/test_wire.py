"""Messages to and from a reading process arrive unchanged, and invalid replies are refused."""

import struct

import pytest
from hypothesis import given
from hypothesis.strategies import binary, booleans, integers, none

from llama_adapter.app.pictures.reading.sources import FileSlice
from llama_adapter.app.pictures.reading.wire import (
    MAX_MESSAGE_BYTES,
    REPLY_HEAD_BYTES,
    REQUEST_HEAD_BYTES,
    ReplyHead,
    ReplyKind,
    Request,
    decode_message,
    encode_message,
    request_sizes,
)
from llama_adapter.runtime.text import UNSAFE_ON_TERMINALS
from llama_adapter.vision.errors import PICTURE_ERROR_CODES

SIDE = 224
PIXEL_BYTES = SIDE * SIDE * 3
SQUARE = {"num_bytes": PIXEL_BYTES, "size": (640, 480), "shape": (SIDE, SIDE)}


@pytest.mark.parametrize(
    "head",
    [
        ReplyHead(kind=ReplyKind.READY),
        ReplyHead(kind=ReplyKind.DIGEST, digest="ab" * 32),
        ReplyHead(kind=ReplyKind.DONE, digest="00" * 32, **SQUARE),
        ReplyHead(kind=ReplyKind.DONE, num_bytes=3 * 5 * 7, size=(50, 70), shape=(5, 7)),
        ReplyHead(kind=ReplyKind.DONE, digest="cd" * 32),
        *(ReplyHead(kind=ReplyKind.DONE, code=code, num_bytes=77) for code in PICTURE_ERROR_CODES),
    ],
)
def test_a_reply_arrives_as_it_was_sent(head: ReplyHead) -> None:
    assert ReplyHead.decode(head.encode(), max_side=SIDE) == head


@pytest.mark.parametrize(
    ("kind", "code", "num_bytes", "rows", "columns"),
    [
        (0, 0, 0, 0, 0),
        (4, 0, 0, 0, 0),
        (ReplyKind.DONE, len(PICTURE_ERROR_CODES) + 1, 0, 0, 0),
        (ReplyKind.DONE, 0, PIXEL_BYTES - 1, SIDE, SIDE),
        (ReplyKind.DONE, 0, PIXEL_BYTES + 1, SIDE, SIDE),
        (ReplyKind.DONE, 0, PIXEL_BYTES, 0, 0),
        (ReplyKind.DONE, 0, (SIDE + 1) * 3, SIDE + 1, 1),
        (ReplyKind.DONE, 0, (SIDE + 1) * 3, 1, SIDE + 1),
        (ReplyKind.DONE, 0, 0, SIDE, SIDE),
        (ReplyKind.DONE, 0, 2**32 - 1, 0, 0),
        (ReplyKind.DONE, 1, MAX_MESSAGE_BYTES + 1, 0, 0),
        (ReplyKind.DONE, 1, 12, 2, 2),
        (ReplyKind.DIGEST, 0, PIXEL_BYTES, SIDE, SIDE),
        (ReplyKind.DIGEST, 1, 5, 0, 0),
        (ReplyKind.READY, 0, 1, 0, 0),
    ],
)
def test_what_no_reading_process_says_is_refused(kind: int, code: int, num_bytes: int, rows: int, columns: int) -> None:
    head = struct.pack("<BBBx32sIIIHH", kind, 1, code, bytes(32), num_bytes, 0, 0, rows, columns)
    with pytest.raises(ValueError, match=r"a reply of kind|bytes for"):
        ReplyHead.decode(head, max_side=SIDE)


def test_a_message_is_cut_to_what_a_reply_may_have() -> None:
    assert len(encode_message("é" * MAX_MESSAGE_BYTES)) == MAX_MESSAGE_BYTES
    assert decode_message(encode_message("so \udcff it is")) == "so \\udcff it is"


@given(kind=integers(0, 3), code=integers(0, 2), rest=binary(min_size=REPLY_HEAD_BYTES, max_size=REPLY_HEAD_BYTES))
def test_any_head_is_refused_or_can_be_sent_again(kind: int, code: int, rest: bytes) -> None:
    assert not UNSAFE_ON_TERMINALS.search(decode_message(rest))
    try:
        head = ReplyHead.decode(bytes([kind, 1, code]) + rest[3:], max_side=SIDE)
    except ValueError:
        return
    assert ReplyHead.decode(head.encode(), max_side=SIDE) == head


@given(binary(max_size=50), integers(0, 2**64 - 1), booleans(), none() | integers(0, 1023))
def test_a_request_arrives_as_it_was_sent(data: bytes, number: int, asks_first: bool, side: int | None) -> None:
    name = data.decode(errors="surrogateescape")
    piece = FileSlice(path=name, offset=number, num_bytes=number, header=number & 0xFFFFFFFF)
    for source in (name, data, piece):
        sent = Request(source=source, name=name or None, asks_first=asks_first, folder=name, side=side)
        head, body = sent.encode()

        assert request_sizes(head[:REQUEST_HEAD_BYTES]) == (len(head) - REQUEST_HEAD_BYTES, len(body))
        assert Request.decode(head[REQUEST_HEAD_BYTES:], body) == sent
