"""Valid pictures in small files that cost a decoder minutes or gigabytes of memory."""

import io
import struct
from functools import cache

from PIL import Image

from scripts.service_bench.bad_files import chunk

_SIGNATURE_AND_HEADER = 33  # bytes of a PNG before the first chunk after the header


@cache
def progressive_jpeg(*, side: int = 7000, num_scans: int = 14_000) -> bytes:
    """A grey square whose last scan is repeated; each scan is decoded over all pixels."""
    content = _plain("JPEG", side=side, progressive=True)
    scan = content[content.rindex(b"\xff\xda") : -2]
    return content[:-2] + scan * num_scans + content[-2:]


@cache
def commented_gif(*, num_bytes: int = 31 * 2**20) -> bytes:
    """A comment in blocks of one byte each, which Pillow concatenates one by one."""
    content = _plain("GIF")
    flags = content[10]
    head = 13 + (3 * (2 << (flags & 7)) if flags & 0x80 else 0)  # header, screen, global colour table
    return content[:head] + b"\x21\xfe" + b"\x01a" * (num_bytes // 2) + b"\x00" + content[head:]


@cache
def segmented_jpeg(*, num_bytes: int = 31 * 2**20) -> bytes:
    """Millions of empty APP5 segments, which Pillow keeps in a list."""
    content = _plain("JPEG")
    return content[:2] + b"\xff\xe5\x00\x02" * (num_bytes // 4) + content[2:]


@cache
def chunked_png(*, num_bytes: int = 31 * 2**20) -> bytes:
    """Millions of empty chunks of a private kind."""
    content, empty = _plain("PNG"), chunk(b"abCd", b"")
    head = content[:_SIGNATURE_AND_HEADER]
    return head + empty * (num_bytes // len(empty)) + content[_SIGNATURE_AND_HEADER:]


def changed(content: bytes, number: int) -> bytes:
    """The same picture with a number appended, so that its digest is new."""
    return content + struct.pack(">Q", number)


KINDS = (
    ("progressive JPEG, 14,000 scans", progressive_jpeg),
    ("GIF, a comment of 16 million blocks", commented_gif),
    ("JPEG, 8 million APP segments", segmented_jpeg),
    ("PNG, 2.7 million chunks", chunked_png),
)


def _plain(kind: str, *, side: int = 8, **options: bool) -> bytes:
    file = io.BytesIO()
    Image.new("L", (side, side), 128).save(file, kind, **options)
    return file.getvalue()
