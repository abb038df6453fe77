"""Files that are no good pictures: bombs, headers that promise too much, damaged files, and files of other kinds."""

import io
import struct
import zipfile
import zlib
from functools import cache

from PIL import Image

from llama_adapter.app.captioning.resources import sample_pictures

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY = 0


@cache
def png_bomb(*, side: int = 30_000) -> bytes:
    """A square PNG of one bit a pixel, all zero: small as a file, one byte a pixel when decoded."""
    row_bytes = 1 + (side + 7) // 8
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(bytes(row_bytes) * 1000) for _ in range(side // 1000))
    packed += packer.compress(bytes(row_bytes) * (side % 1000)) + packer.flush()
    return png(width=side, height=side, bits=1, packed=packed)


def png(*, width: int, height: int, bits: int = 8, packed: bytes = b"", more: bytes = b"") -> bytes:
    """A grey PNG of any header; `packed` is its compressed pixels, `more` chunks before them."""
    header = struct.pack(">IIBBBBB", width, height, bits, _GREY, 0, 0, 0)
    return _SIGNATURE + chunk(b"IHDR", header) + more + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def chunk(kind: bytes, content: bytes) -> bytes:
    """One chunk of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


@cache
def png_with_text_bomb(*, mebibytes: int = 1024) -> bytes:
    """A PNG of one pixel with a compressed comment of zeros."""
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(bytes(2**20)) for _ in range(mebibytes)) + packer.flush()
    comment = chunk(b"zTXt", b"Comment\0\0" + packed)
    return png(width=1, height=1, packed=zlib.compress(b"\0\0"), more=comment)


def jpeg_header(*, width: int, height: int) -> bytes:
    """The head of a JPEG, without any pixels."""
    frame = struct.pack(">BHHB", 8, height, width, 1) + b"\x01\x11\x00"
    scan = b"\x01\x01\x00\x00\x3f\x00"
    return (
        b"\xff\xd8"
        + b"\xff\xc0"
        + struct.pack(">H", len(frame) + 2)
        + frame
        + b"\xff\xda"
        + struct.pack(">H", len(scan) + 2)
        + scan
        + b"\xff\xd9"
    )


def truncated_jpeg() -> bytes:
    """The first half of a sample picture."""
    content = (sample_pictures() / "12-red-star.jpg").read_bytes()
    return content[: len(content) // 2]


def large_gif_frame() -> bytes:
    """A GIF of one pixel whose first frame says it is 65,535 pixels wide and high."""
    screen = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
    return screen + b"," + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0) + b"\x02\x02\x44\x01\x00;"


@cache
def zip_bomb(*, mebibytes: int = 512) -> bytes:
    """A zip file of zeros."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("zeros", "w") as member:
        for _ in range(mebibytes):
            member.write(bytes(2**20))
    return content.getvalue()


def largest_picture(*, num_pixels: int) -> bytes:
    """A valid RGB picture of one colour with this number of pixels."""
    side = int(num_pixels**0.5)
    content = io.BytesIO()
    Image.new("RGB", (side, side), (200, 30, 30)).save(content, "PNG", compress_level=1)
    return content.getvalue()


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><image href="file:///etc/passwd"/></svg>'
HTML = b"<!DOCTYPE html><html><body><script>alert(1)</script></body></html>"
