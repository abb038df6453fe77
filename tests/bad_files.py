"""Invalid pictures: bombs, huge sizes, damaged files, other file types; and valid ones that are slow to read."""

import io
import struct
import zlib
from functools import cache

from PIL import Image

from llama_adapter.app.models.resources import sample_pictures

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY = 0
_BLOCK = 2**20


@cache
def png_bomb(*, side: int = 30_000) -> bytes:
    """A square PNG with one bit per pixel, all zero: a small file that needs one byte per pixel when decoded."""
    row_bytes = 1 + (side + 7) // 8
    return png(width=side, height=side, bits=1, packed=packed_zeros(row_bytes * side))


def packed_zeros(num_bytes: int) -> bytes:
    """`num_bytes` zeros, compressed by zlib.

    The blocks repeat the first one, because compressing all of them takes seconds.
    """
    checksum = num_bytes % 65521 << 16 | 1  # Adler-32
    packer = zlib.compressobj(9, wbits=-15)
    first = packer.compress(bytes(_BLOCK)) + packer.flush(zlib.Z_FULL_FLUSH)
    blocks = first * (num_bytes // _BLOCK) + packer.compress(bytes(num_bytes % _BLOCK)) + packer.flush()
    return b"\x78\xda" + blocks + struct.pack(">I", checksum)


def png(*, width: int, height: int, bits: int = 8, packed: bytes = b"", more: bytes = b"") -> bytes:
    """A grey PNG with any header; `packed` is its compressed pixels, `more` are chunks before the pixels."""
    header = struct.pack(">IIBBBBB", width, height, bits, _GREY, 0, 0, 0)
    return _SIGNATURE + chunk(b"IHDR", header) + more + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def chunk(kind: bytes, content: bytes) -> bytes:
    """One chunk of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


@cache
def png_with_text_bomb(*, mebibytes: int = 1024) -> bytes:
    """A PNG of one pixel with a compressed comment of zeros."""
    comment = chunk(b"zTXt", b"Comment\0\0" + packed_zeros(mebibytes * 2**20))
    return png(width=1, height=1, packed=zlib.compress(b"\0\0"), more=comment)


def jpeg_header(*, width: int, height: int) -> bytes:
    """The header of a JPEG, without any pixels."""
    frame = struct.pack(">BHHB", 8, height, width, 1) + b"\x01\x11\x00"
    return b"\xff\xd8" + _segment(0xC0, frame) + _segment(0xDA, b"\x01\x01\x00\x00\x3f\x00") + b"\xff\xd9"


def _segment(kind: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, kind, len(content) + 2) + content


def truncated_jpeg() -> bytes:
    """The first half of a sample picture."""
    content = (sample_pictures() / "12-red-star.jpg").read_bytes()
    return content[: len(content) // 2]


def large_gif_frame() -> bytes:
    """A GIF of one pixel whose first frame claims 65,535 x 65,535 pixels."""
    screen = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
    return screen + b"," + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0) + b"\x02\x02\x44\x01\x00;"


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><image href="file:///etc/passwd"/></svg>'
HTML = b"<!DOCTYPE html><html><body><script>alert(1)</script></body></html>"


# Valid pictures in small files that cost a decoder minutes or gigabytes of memory


@cache
def progressive_jpeg(*, side: int = 7000, num_scans: int = 14_000) -> bytes:
    """A grey square whose last scan is repeated; each scan is decoded over all pixels."""
    content = _plain("JPEG", side=side, progressive=True)
    scan = content[content.rindex(b"\xff\xda") : -2]
    return content[:-2] + scan * num_scans + content[-2:]


@cache
def segmented_jpeg(*, num_bytes: int = 31 * 2**20) -> bytes:
    """Millions of empty APP5 segments, which Pillow keeps in a list."""
    content = _plain("JPEG")
    return content[:2] + b"\xff\xe5\x00\x02" * (num_bytes // 4) + content[2:]


def changed(content: bytes, number: int) -> bytes:
    """The same picture with a number appended, so that its digest is new."""
    return content + struct.pack(">Q", number)


def _plain(kind: str, *, side: int = 8, **options: bool) -> bytes:
    file = io.BytesIO()
    Image.new("L", (side, side), 128).save(file, kind, **options)
    return file.getvalue()
