"""Small files that demand much: pixels, memory, time, or text."""

import struct
import zlib
from collections.abc import Iterator

from tests.bad_files import (
    chunk,
    jpeg_header,
    large_gif_frame,
    packed_zeros,
    png,
    png_bomb,
    png_with_text_bomb,
)
from tests.odd_pictures.samples import OddFile, saved, scene

MEBIBYTE = 2**20
_PIXEL = zlib.compress(b"\0\0")  # the data of a grey PNG with one pixel


def bombs() -> Iterator[OddFile]:
    """All bombs, a few hundred kilobytes in total."""
    yield from _sizes()
    yield from _texts()
    yield from _tags()
    yield OddFile(
        "largest.png", png_bomb(side=11_300), "readable", "128 million pixels, as many as are read, in few bytes"
    )


def _sizes() -> Iterator[OddFile]:
    for name, content, why in (
        ("png-60000.png", png(width=60_000, height=60_000), "a header of 3.6 billion pixels and no data"),
        ("png-limit.png", png(width=2**31 - 1, height=2**31 - 1), "a header of the most that a PNG can have"),
        ("png-30000.png", png_bomb(), "900 million pixels of zeros"),
        ("jpeg-65500.jpg", jpeg_header(width=65_500, height=65_500), "a header of 4.3 billion pixels"),
        ("gif-frame.gif", large_gif_frame(), "a frame of 4.3 billion pixels on a canvas of one"),
        ("gif-canvas.gif", _gif(width=65_535, height=65_535), "a canvas of 4.3 billion pixels, a frame of one"),
        ("bmp-side.bmp", _bmp(width=100_000, height=100_000), "a header of ten billion pixels"),
        ("ppm-side.ppm", b"P6\n99999 99999\n255\n\0\0\0", "a header of ten billion pixels"),
        ("ppm-digits.ppm", b"P6\n" + b"9" * 100_000, "a width of a hundred thousand digits"),
        ("webp-side.webp", _webp(width=16_384, height=16_384), "a canvas of 268 million pixels"),
        ("tiff-side.tif", _tiff({256: 200_000, 257: 200_000, 258: 8, 259: 1, 262: 1, 273: 8, 279: 1}), "a huge page"),
    ):
        yield OddFile(name, content, "error", why)


def _texts() -> Iterator[OddFile]:
    yield OddFile("ztxt.png", png_with_text_bomb(mebibytes=96), "readable", "a comment of 96 MiB")
    packed = packed_zeros(96 * MEBIBYTE)
    profile = chunk(b"iCCP", b"profile\0\0" + packed)
    yield OddFile("iccp.png", png(width=1, height=1, packed=_PIXEL, more=profile), "readable", "a profile of 96 MiB")
    comment = chunk(b"iTXt", b"Comment\0\x01\0\0\0" + packed)
    yield OddFile("itxt.png", png(width=1, height=1, packed=_PIXEL, more=comment), "readable", "a comment of 96 MiB")
    many = chunk(b"tEXt", b"Comment\0" + b"x" * 1000) * 2000
    yield OddFile("texts.png", png(width=1, height=1, packed=_PIXEL, more=many), "either", "two thousand comments")
    more_than_promised = packed_zeros(64 * MEBIBYTE)
    yield OddFile("data.png", png(width=1, height=1, packed=more_than_promised), "either", "64 MiB for one pixel")
    jpeg = saved(scene(), "JPEG")
    comments = (b"\xff\xfe\xff\xff" + b"c" * 65_533) * 20
    yield OddFile("comments.jpg", jpeg[:2] + comments + jpeg[2:], "readable", "comments of 1.3 MB")


def _tags() -> Iterator[OddFile]:
    sound = {256: 1, 257: 1, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1, 279: 1}
    for name, changed, why in (
        ("strips", {273: (4, 2**32 - 1, 8)}, "four billion strips"),
        ("strip-bytes", {279: 2**32 - 1}, "a strip of 4 GiB"),
        ("strip-far", {273: 2**32 - 2}, "a strip far behind the end"),
        ("samples", {277: 65_535}, "65,535 values a pixel"),
        ("bits", {258: (3, 2**28, 8)}, "268 million numbers of bits"),
        ("compression", {259: 34_925}, "a compression that was not asked for"),
        ("rows", {278: 0}, "strips of no rows"),
        ("tile", {322: 2**31, 323: 2**31, 324: 8, 325: 1}, "a tile of 4 quintillion pixels"),
    ):
        yield OddFile(f"tiff-{name}.tif", _tiff(sound | changed), "either", why)
    loop = bytearray(_tiff(sound))
    loop[-4:] = struct.pack("<I", 9)  # the next page is the same page
    yield OddFile("tiff-loop.tif", bytes(loop), "either", "pages that never end")


def _tiff(tags: dict[int, int | tuple[int, int, int]]) -> bytes:
    """A page of tags: a number, or type, count and value. Its data are the byte after the header."""
    entries = b""
    for tag, value in sorted(tags.items()):
        kind, count, number = value if isinstance(value, tuple) else (4, 1, value)
        entries += struct.pack("<HHII", tag, kind, count, number)
    return b"II*\x00" + struct.pack("<I", 9) + b"\x80" + struct.pack("<H", len(tags)) + entries + bytes(4)


def _gif(*, width: int, height: int) -> bytes:
    screen = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    return screen + b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00;"


def _bmp(*, width: int, height: int) -> bytes:
    return b"BM" + struct.pack("<IHHIIiiHHIIiiII", 58, 0, 0, 54, 40, width, height, 1, 24, 0, 4, 0, 0, 0, 0) + bytes(4)


def _webp(*, width: int, height: int) -> bytes:
    canvas = struct.pack("<I", 0x02) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", len(canvas)) + canvas
    return b"RIFF" + struct.pack("<I", len(body)) + body
