"""Messages to and from a reading process survive the way, and what no such process says is refused."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.reading.sources import FileSlice
from app.reading.wire import (
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
from vision.errors import PICTURE_ERROR_CODES
from vision.formats import UNSAFE_ON_TERMINALS

PIXEL_BYTES = 224 * 224 * 3
ANY_NAME = st.text(st.characters(codec=None, exclude_categories=()))
SOURCES = st.one_of(
    ANY_NAME,
    st.binary(),
    st.builds(
        FileSlice,
        path=ANY_NAME,
        offset=st.integers(0, 2**62),
        num_bytes=st.integers(0, 2**62),
        header=st.none() | st.integers(0, 2**32 - 1),
    ),
)


@given(SOURCES, st.none() | ANY_NAME, st.booleans(), st.none() | ANY_NAME)
def test_a_request_arrives_as_it_was_sent(
    source: str | bytes | FileSlice, name: str | None, asks_first: bool, folder: str | None
) -> None:
    request = Request(source=source, name=name, asks_first=asks_first, folder=folder)

    head, data = request.encode()

    assert request_sizes(head[:REQUEST_HEAD_BYTES]) == (len(head) - REQUEST_HEAD_BYTES, len(data))
    assert Request.decode(head[REQUEST_HEAD_BYTES:], data) == request


@pytest.mark.parametrize(
    "head",
    [
        ReplyHead(kind=ReplyKind.READY, digest="", code=None, num_bytes=0),
        ReplyHead(kind=ReplyKind.DIGEST, digest="ab" * 32, code=None, num_bytes=0),
        ReplyHead(kind=ReplyKind.DONE, digest="00" * 32, code=None, num_bytes=PIXEL_BYTES),
        ReplyHead(kind=ReplyKind.DONE, digest="cd" * 32, code=None, num_bytes=0),
        *(ReplyHead(kind=ReplyKind.DONE, digest="", code=code, num_bytes=77) for code in PICTURE_ERROR_CODES),
    ],
)
def test_a_reply_arrives_as_it_was_sent(head: ReplyHead) -> None:
    assert ReplyHead.decode(head.encode(), pixel_bytes=PIXEL_BYTES) == head


@pytest.mark.parametrize(
    ("kind", "code", "num_bytes"),
    [
        (0, 0, 0),
        (4, 0, 0),
        (ReplyKind.DONE, len(PICTURE_ERROR_CODES) + 1, 0),
        (ReplyKind.DONE, 0, PIXEL_BYTES - 1),
        (ReplyKind.DONE, 0, PIXEL_BYTES + 1),
        (ReplyKind.DONE, 0, 2**32 - 1),
        (ReplyKind.DONE, 1, MAX_MESSAGE_BYTES + 1),
        (ReplyKind.DIGEST, 0, PIXEL_BYTES),
        (ReplyKind.DIGEST, 1, 5),
        (ReplyKind.READY, 0, 1),
    ],
)
def test_what_no_reading_process_says_is_refused(kind: int, code: int, num_bytes: int) -> None:
    head = struct.pack("<BBBx32sI", kind, 1, code, bytes(32), num_bytes)
    with pytest.raises(ValueError, match=r"a reply of kind|bytes where"):
        ReplyHead.decode(head, pixel_bytes=PIXEL_BYTES)


@given(st.binary(min_size=REPLY_HEAD_BYTES, max_size=REPLY_HEAD_BYTES))
def test_a_head_of_any_bytes_is_refused_or_is_within_bounds(head: bytes) -> None:
    try:
        reply = ReplyHead.decode(head, pixel_bytes=PIXEL_BYTES)
    except ValueError:
        return
    assert reply.num_bytes in (0, PIXEL_BYTES) or (reply.code is not None and reply.num_bytes <= MAX_MESSAGE_BYTES)
    assert len(reply.digest) in (0, 64)


@given(st.binary(max_size=200))
def test_a_message_of_any_bytes_can_be_shown(message: bytes) -> None:
    assert not UNSAFE_ON_TERMINALS.search(decode_message(message))


def test_a_message_is_cut_to_what_a_reply_may_have() -> None:
    assert len(encode_message("é" * MAX_MESSAGE_BYTES)) == MAX_MESSAGE_BYTES
    assert decode_message(encode_message("so \udcff it is")) == "so \\udcff it is"
