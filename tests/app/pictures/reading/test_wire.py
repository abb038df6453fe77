"""Messages to and from a reading process arrive unchanged, and invalid replies are refused."""

import struct

import pytest

from llama_adapter.app.pictures.reading.wire import (
    MAX_MESSAGE_BYTES,
    ReplyHead,
    ReplyKind,
    decode_message,
    encode_message,
)
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
