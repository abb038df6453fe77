"""The picture reader: any bytes give pixels or one of the listed errors."""

import hashlib
import zlib

import numpy as np
from hypothesis.strategies import DrawFn

from llama_adapter.app.pictures.reading.reader import PictureReader
from llama_adapter.app.pictures.reading.spec import ReadingSpec
from llama_adapter.vision.errors import PICTURE_ERROR_CODES, PictureError
from llama_adapter.vision.pixels import PixelRule
from tests.fuzz.mutators import mutated_bytes, mutated_jpeg, mutated_png, one_in
from tests.fuzz.target import Target, refused
from tests.odd_pictures.kinds import kinds
from tests.odd_pictures.samples import saved, scene, sound_files

SIDE = 32
VIEW_SIDE = 48
MAX_PIXELS = 4_000_000  # with the default limit, decoding would take most of the time
_READERS = [
    PictureReader(
        ReadingSpec(exif=exif, reading=reading, channel_order=order, max_pixels=MAX_PIXELS),
        pixels=PixelRule(image_size=SIDE),
    )
    for exif in ("upright", "ignore")
    for reading in ("exact", "fast")
    for order in ("rgb", "bgr")
]
_TOKENS = (
    *(b"\xff\xd8", b"\xff\xd9", b"\xff\xc0", b"\xff\xc2", b"\xff\xda", b"Exif\0\0", b"II*\0", b"MM\0*", b"GIF89a"),
    *(b"!\xfe", b"!\xff\x0bNETSCAPE2.0", b"!\xf9\x04", b"VP8 ", b"P6\n", b"P5 ", b"Pf\n-1.0\n", b"65535\n"),
    *b"RIFF WEBPVP8X WEBPVP8L ALPH ANIM EXIF BM P1 ftypavif meta iloc ipco ispe av01".split(),
)


def read(data: bytes) -> str:
    """Bytes of a picture through `PictureReader`: header, decoder, orientation, resizing.

    Their checksum chooses how: for the encoder or, in one of eight cases, as a view.
    """
    choice = zlib.crc32(data)
    reader, side = _READERS[choice % len(_READERS)], VIEW_SIDE if choice % 64 < 8 else None
    reading = reader.read(data, name="picture", side=side)
    if data:
        assert reading.digest == hashlib.sha256(data).hexdigest()
    if reading.error is not None:
        assert reading.pixels is None
        assert reading.error.code in PICTURE_ERROR_CODES
        return refused(PictureError(reading.error.code, reading.error.message))  # type: ignore[arg-type]
    assert reading.pixels is not None
    rows, columns, colours = reading.pixels.shape
    assert (colours, reading.pixels.dtype) == (3, np.uint8)
    assert (rows, columns) == (SIDE, SIDE) if side is None else 1 <= min(rows, columns) <= max(rows, columns) <= side
    assert 1 <= reading.width * reading.height <= MAX_PIXELS
    if choice // 64 % 16 == 0:
        again = reader.read(data, name="picture", side=side)
        assert again.pixels is not None
        assert np.array_equal(again.pixels, reading.pixels)
    return f"ok {reading.pixels.min() // 64} {reading.pixels.max() // 64}"


def _seeds() -> dict[str, bytes]:
    small = scene(width=24, height=16)
    files = {f"sound.{suffix}": data for suffix, data in sound_files().items()}
    files |= {file.name: file.content for file in kinds() if len(file.content) <= 8192 and file.name.isascii()}
    files |= {
        "small.avif": saved(small, "AVIF"),
        "small.jpg": saved(small, "JPEG", progressive=True),
        "frames.gif": saved(small, "GIF", save_all=True, append_images=[small.rotate(90)]),
        "frames.webp": saved(small, "WEBP", save_all=True, append_images=[small.rotate(90)]),
        "frames.png": saved(small, "PNG", save_all=True, append_images=[small.rotate(90)]),
        "small.ppm": saved(small, "PPM"),
        "grey.tif": saved(small.convert("L"), "TIFF", compression="tiff_adobe_deflate"),
        "tiny.bmp": saved(small.convert("P"), "BMP"),
    }
    return files


_as_bytes = mutated_bytes(*_TOKENS)


def _mutate(draw: DrawFn, data: bytes) -> bytes:
    if data.startswith(b"\x89PNG") and not one_in(draw, 5):
        return mutated_png(draw, data)
    if data.startswith(b"\xff\xd8") and not one_in(draw, 5):
        return mutated_jpeg(draw, data)
    return _as_bytes(draw, data)


TARGETS = (Target("picture", read, _seeds, _mutate),)
