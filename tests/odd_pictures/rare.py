"""Complete files of rare kinds that Pillow does not decode; some with the words that name their kind."""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import PIL
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from tests.bad_files import chunk
from tests.odd_pictures.damaged import jpeg_markers
from tests.odd_pictures.samples import saved, scene, sound_files

WIDTH, HEIGHT = 40, 30
_FRAME = 0xC0
_READ_SINCE_13 = ("rare-ycbcr.tif", "rare-one-colour.bmp")


@dataclass(frozen=True, slots=True)
class RareFile:
    """A complete file; the message that refuses it contains `kind`, if it is named."""

    name: str
    content: bytes
    kind: str = ""

    @property
    def is_read(self) -> bool:
        """Whether the installed Pillow decodes it."""
        return self.name in _READ_SINCE_13 and int(PIL.__version__.split(".")[0]) >= 13


def rare_files() -> Iterator[RareFile]:
    """All of these files, a few kilobytes each."""
    yield from _jpegs()
    yield from _tiffs()
    yield from _bmps()
    yield from _others()


# JPEG: valid files whose frame header gives another kind. Pillow's decoder stops at this header.


def _jpegs() -> Iterator[RareFile]:
    for marker, bits, kind in (
        (0xC1, 12, "sequential JPEG (3 components of 12 bits)"),
        (0xC2, 12, "progressive JPEG (3 components of 12 bits)"),
        (0xC3, 16, "lossless JPEG (3 components of 16 bits)"),
        (0xC5, 8, "hierarchical JPEG"),
        (0xCB, 8, "JPEG with arithmetic coding"),
        (0xF7, 8, "JPEG-LS picture"),
    ):
        yield RareFile(f"rare-{marker:x}-{bits}.jpg", jpeg_of_kind(marker, bits=bits), kind)
    jpeg = sound_files()["jpg"]
    at, end = next((start, end) for marker, start, end in jpeg_markers(jpeg) if marker == _FRAME)
    frame = b"\xff\xc0" + struct.pack(">HBHHB", 14, 8, HEIGHT, WIDTH, 2) + b"\x01\x11\0\x02\x11\0"
    yield RareFile("rare-2-components.jpg", jpeg[:at] + frame + jpeg[end:], "baseline JPEG (2 components of 8 bits)")


def jpeg_of_kind(marker: int, *, bits: int) -> bytes:
    """A valid JPEG whose frame header says that it is of another kind."""
    jpeg = sound_files()["jpg"]
    at = next(start for marker, start, _ in jpeg_markers(jpeg) if marker == _FRAME)
    return jpeg[: at + 1] + bytes([marker]) + jpeg[at + 2 : at + 4] + bytes([bits]) + jpeg[at + 5 :]


# TIFF


def _tiffs() -> Iterator[RareFile]:
    grey, colours = np.ones((HEIGHT, WIDTH, 1)), np.ones((HEIGHT, WIDTH, 3))
    for pixels, dtypes in (grey, ("f2", "f8", "i8", "u8", "c8")), (colours, ("f4", "f8", "i1", "u4")):
        for dtype in dtypes:
            yield RareFile(f"rare-{dtype}-{pixels.shape[2]}.tif", tiff(pixels.astype(dtype)))
    yield RareFile("rare-u1-7.tif", tiff(np.ones((HEIGHT, WIDTH, 7), "u1")))
    yield RareFile("rare-big-endian.tif", tiff(colours.astype(">f4")))
    yield RareFile("rare-big.tif", tiff(colours.astype("f4"), is_big=True))
    yield RareFile("rare-big-endian-big.tif", tiff(colours.astype(">f4"), is_big=True))
    yield RareFile("rare-strips.tif", tiff(colours.astype("f4"), num_strips=HEIGHT))
    yield RareFile("rare-10-bits.tif", tiff(grey.astype("u2"), bits=10))
    yield RareFile("rare-ycbcr.tif", tiff(colours.astype("u1"), photometric=6))
    yield RareFile("rare-raw.tif", tiff(grey.astype("u1"), photometric=32803))
    for compression in (34661, 34712, 34887, 34933, 34934, 50001, 50002, 12345):  # JBIG, JPEG 2000, LERC and others
        yield RareFile(f"rare-compression-{compression}.tif", tiff(colours.astype("u1"), compression=compression))


def tiff(
    pixels: np.ndarray[Any, Any],
    *,
    compression: int = 1,
    photometric: int | None = None,
    bits: int | None = None,
    num_strips: int = 1,
    is_big: bool = False,
) -> bytes:
    """A TIFF of (height, width, values) with the type and byte order of `pixels`; the strips follow the tags."""
    height, width, num_values = pixels.shape
    data = pixels.tobytes()
    strip = len(data) // num_strips
    order = b"MM" if pixels.dtype.str.startswith(">") else b"II"
    tags = ImageFileDirectory_v2(order + b"*\0" + bytes(4))
    tags._bigtiff = is_big  # Pillow takes no header of a BigTIFF in big-endian order
    for tag, value in {
        256: width,
        257: height,
        258: [bits or pixels.dtype.itemsize * 8] * num_values,
        259: compression,
        262: (2 if num_values == 3 else 1) if photometric is None else photometric,
        273: [strip * number for number in range(num_strips)],  # from the end of the tags on
        277: num_values,
        278: height // num_strips,
        279: [strip] * num_strips,
        339: [{"u": 1, "i": 2, "f": 3, "c": 6}[pixels.dtype.kind]] * num_values,
    }.items():
        tags[tag] = value
    file = BytesIO()
    tags.save(file)
    return file.getvalue() + data


# BMP


def _bmps() -> Iterator[RareFile]:
    colours = bytes(range(256)) * 4
    rle = b"".join(bytes((WIDTH, row, 0, 0)) for row in range(HEIGHT // 2)) + b"\0\1"
    for name, options in (
        ("2-bit", {"bits": 2, "colours": colours[:16]}),
        ("5-bit", {"bits": 5}),
        ("48-bit", {"bits": 48}),
        ("64-bit", {"bits": 64}),
        ("one-colour", {"bits": 1, "colours": b"\0\0\0\0", "num_colours": 1}),
        ("many-colours", {"bits": 8, "colours": colours * 2, "num_colours": 300}),
        ("os2-16", {"header_size": 16}),
        ("os2-24", {"header_size": 24}),
        ("os2-48", {"header_size": 48}),
        ("header-128", {"header_size": 128}),
        ("rle8-cut", {"bits": 8, "compression": 1, "colours": colours, "pixels": rle}),
        ("rle4-cut", {"bits": 4, "compression": 2, "colours": colours[:64], "pixels": rle}),
        ("huffman", {"bits": 1, "compression": 3, "header_size": 64, "pixels": bytes(90)}),
        ("rle24", {"bits": 24, "compression": 4, "header_size": 64, "pixels": bytes(90)}),
        ("jpeg", {"bits": 0, "compression": 4, "pixels": sound_files()["jpg"]}),
        ("png", {"bits": 0, "compression": 5, "pixels": sound_files()["png"]}),
        ("alpha", {"bits": 32, "compression": 6, "masks": (0xFF, 0xFF00, 0xFF0000, 255 << 24)}),
        ("cmyk", {"bits": 32, "compression": 11}),
        ("cmyk-rle", {"bits": 8, "compression": 12, "colours": colours, "pixels": rle}),
        ("231", {"bits": 16, "compression": 3, "masks": (0xC0, 0x38, 1)}),
        ("444", {"bits": 16, "compression": 3, "masks": (0xF00, 0xF0, 0xF)}),
        ("11-11-10", {"bits": 32, "compression": 3, "masks": (2047 << 21, 2047 << 10, 1023)}),
        ("7-18-7", {"bits": 32, "compression": 3, "masks": (127 << 25, 262143 << 7, 127)}),
    ):
        yield RareFile(f"rare-{name}.bmp", bmp(**options))


def bmp(
    *,
    bits: int = 24,
    compression: int = 0,
    header_size: int = 40,
    pixels: bytes | None = None,
    colours: bytes = b"",
    num_colours: int = 0,
    masks: tuple[int, ...] = (),
) -> bytes:
    """A BMP with these values in its header, and with grey noise if no pixels are given."""
    if pixels is None:
        pixels = bytes(number * 7 % 256 for number in range((WIDTH * bits + 31) // 32 * 4 * HEIGHT))
    fields = (header_size, WIDTH, HEIGHT, 1, bits, compression, len(pixels), 2835, 2835, num_colours, 0)
    header = struct.pack("<IiiHHIIiiII", *fields)[:header_size].ljust(header_size, b"\0")
    header += struct.pack(f"<{len(masks)}I", *masks)
    start = 14 + len(header) + len(colours)
    return b"BM" + struct.pack("<IHHI", start + len(pixels), 0, 0, start) + header + colours + pixels


# Others


def _others() -> Iterator[RareFile]:
    pixels = bytes(range(48))
    pam = b"P7\nWIDTH 4\nHEIGHT 4\nDEPTH 3\nMAXVAL 255\nTUPLTYPE RGB\nENDHDR\n" + pixels
    yield RareFile("rare.pam", pam, "a PAM picture")
    yield RareFile("rare-colours.pfm", b"PF\n4 4\n-1.0\n" + pixels * 4, "a PFM picture in colour")
    packer = zlib.compressobj(wbits=-15)
    packed = packer.compress(b"\0" * 17 * 4) + packer.flush()
    head = struct.pack(">IIBBBBB", 4, 4, 8, 6, 0, 0, 0)
    chunks = chunk(b"CgBI", b"P\0 \2") + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    yield RareFile("rare-apple.png", b"\x89PNG\r\n\x1a\n" + chunks, "Apple's own form (CgBI)")
    array = b"BA" + struct.pack("<IIHH", 40, 0, 0, 0) + saved(scene(), "BMP")
    yield RareFile("rare-array.bmp", array, "an OS/2 bitmap array")
    for name, start, kind in (
        ("exr", b"\x76\x2f\x31\x01", "an OpenEXR picture"),
        ("hdr", b"#?RADIANCE\n", "a Radiance HDR picture"),
        ("jxr", b"II\xbc\x01", "a JPEG XR picture"),
        ("mng", b"\x8aMNG\r\n\x1a\n", "an MNG animation"),
        ("qoi", b"qoif", "a QOI picture"),
        ("dds", b"DDS |\0\0\0", "a DirectDraw surface"),
        ("xcf", b"gimp xcf v011\0", "a GIMP file"),
    ):
        yield RareFile(f"rare.{name}", start + bytes(60), kind)
