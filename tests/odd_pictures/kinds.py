"""Valid pictures of unusual kinds: colour models, depths, palettes, animations, orientations, shapes."""

import struct
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image, features

from tests.bad_files import chunk
from tests.odd_pictures.damaged import jpeg_markers
from tests.odd_pictures.rare import rare_files
from tests.odd_pictures.samples import OddFile, saved, scene, sound_files

_RGB, _PALETTE = 2, 3
_ORIENTATION = 0x0112
_DEEP = np.linspace(0, 65535, 1200).astype(np.uint16).reshape(30, 40)
_FLOATS = np.linspace(0, 1, 1200, dtype=np.float32).reshape(30, 40)


def kinds() -> Iterator[OddFile]:
    """All of these pictures."""
    for name, content, why in (*_jpegs(), *_pngs(), *_tiffs(), *_others(), *_animations(), *_shapes()):
        yield OddFile(name, content, "readable", why)
    yield from _orientations()
    yield from _out_of_range()
    for rare in rare_files():
        yield OddFile(rare.name, rare.content, "readable" if rare.is_read else "error", rare.kind)


def _jpegs() -> Iterator[tuple[str, bytes, str]]:
    cmyk = saved(scene("CMYK"), "JPEG", quality=90)
    yield "cmyk.jpg", cmyk, "CMYK, as print shops have it"
    yield "ycck.jpg", _with_adobe_transform(cmyk, 2), "YCCK: Adobe's other way to write CMYK"
    yield "cmyk-without-adobe.jpg", _without(cmyk, 0xEE), "CMYK without Adobe's marker"
    yield "grey.jpg", saved(scene("L"), "JPEG"), "grey"
    yield "rgb-inside.jpg", saved(scene(), "JPEG", keep_rgb=True), "RGB rather than YCbCr"
    yield "restarts.jpg", saved(scene(), "JPEG", restart_marker_blocks=1), "restart markers after each block"
    yield "progressive.jpg", saved(scene(), "JPEG", progressive=True), "progressive"
    yield "worst.jpg", saved(scene(), "JPEG", quality=1), "the coarsest quality"
    yield "full-colour.jpg", saved(scene(), "JPEG", subsampling=0), "colours at full size"
    yield "without-jfif.jpg", _without(sound_files()["jpg"], 0xE0), "without the JFIF head"
    yield "two.mpo", saved(scene(), "MPO", save_all=True, append_images=[scene("L")]), "two pictures in an MPO"
    yield "mpo-inside.jpg", saved(scene(), "MPO", save_all=True, append_images=[scene()]), "an MPO named JPEG"


def _pngs() -> Iterator[tuple[str, bytes, str]]:
    yield "1-bit.png", saved(scene("1"), "PNG"), "one bit a pixel"
    for bits in (1, 2, 4):
        yield f"palette-{bits}.png", saved(scene("P").quantize(2**bits), "PNG", bits=bits), f"a palette, {bits} bits"
    yield "palette-transparent.png", saved(scene("P"), "PNG", transparency=3), "a palette with a transparent colour"
    yield "palette-alphas.png", saved(scene("P"), "PNG", transparency=bytes(range(256))), "a palette of opacities"
    yield "grey-alpha.png", saved(scene("LA"), "PNG"), "grey with opacity"
    yield "alpha.png", saved(scene("RGBA"), "PNG"), "colours with opacity"
    yield "all-transparent.png", saved(Image.new("RGBA", (40, 30)), "PNG"), "nothing to be seen"
    yield "grey-transparent.png", saved(scene("L"), "PNG", transparency=7), "grey with a transparent value"
    yield "rgb-transparent.png", saved(scene(), "PNG", transparency=(1, 2, 3)), "a transparent colour"
    yield "16-bit.png", saved(Image.fromarray(_DEEP), "PNG"), "16 bits, grey"
    yield "16-bit-rgb.png", _deep_png(), "16 bits, colours"
    yield "interlaced.png", _interlaced_png(), "interlaced"
    yield "many-chunks.png", _rechunked(sound_files()["png"]), "data in chunks of one byte"


def _tiffs() -> Iterator[tuple[str, bytes, str]]:
    for compression in ("raw", "packbits", "tiff_lzw", "tiff_adobe_deflate", "jpeg", "tiff_deflate"):
        yield f"{compression}.tif", saved(scene(), "TIFF", compression=compression), f"compressed by {compression}"
    yield "fax.tif", saved(scene("1"), "TIFF", compression="group4"), "one bit a pixel, as faxes are"
    for name, pixels, why in (
        ("16-bit", _DEEP, "16 bits, grey"),
        ("16-bit-big-endian", _DEEP.astype(">u2"), "the same, swapped"),
        ("32-bit", _DEEP.astype(np.int32), "32 bits, grey"),
        ("float", _FLOATS, "floats"),
    ):
        yield f"{name}.tif", saved(Image.fromarray(pixels), "TIFF"), why
    yield "cmyk.tif", saved(scene("CMYK"), "TIFF"), "CMYK"
    yield "palette.tif", saved(scene("P"), "TIFF"), "a palette"
    yield "alpha.tif", saved(scene("RGBA"), "TIFF"), "colours with opacity"
    yield "pages.tif", saved(scene(), "TIFF", save_all=True, append_images=[scene("L"), scene("1")]), "three pages"
    yield "big.tif", saved(scene(), "TIFF", big_tiff=True), "offsets of 64 bits"


def _others() -> Iterator[tuple[str, bytes, str]]:
    yield "lossless.webp", saved(scene("RGBA"), "WEBP", lossless=True), "lossless, with opacity"
    yield "alpha.webp", saved(scene("RGBA"), "WEBP"), "with opacity"
    yield "1-bit.bmp", saved(scene("1"), "BMP"), "one bit a pixel"
    yield "palette.bmp", saved(scene("P"), "BMP"), "a palette"
    yield "alpha.bmp", saved(scene("RGBA"), "BMP"), "with opacity"
    yield "transparent.gif", saved(scene("P"), "GIF", transparency=0), "a transparent colour"
    yield "grey.pgm", saved(scene("L"), "PPM"), "plain grey"
    yield "1-bit.pbm", saved(scene("1"), "PPM"), "plain bits"
    yield "text.ppm", b"P3\n# a comment\n2 2\n255\n255 0 0 0 255 0 0 0 255 9 9 9\n", "numbers as text"
    yield "float.pfm", saved(Image.fromarray(_FLOATS), "PPM"), "floats"
    if features.check("avif"):
        yield "sound.avif", saved(scene(), "AVIF"), "AVIF"
        yield "alpha.avif", saved(scene("RGBA"), "AVIF"), "AVIF with opacity"


def _animations() -> Iterator[tuple[str, bytes, str]]:
    frames = [scene().rotate(angle) for angle in (90, 180, 270)]
    for name, kind in (("animated.gif", "GIF"), ("animated.webp", "WEBP"), ("animated.png", "PNG")):
        yield name, saved(scene(), kind, save_all=True, append_images=frames, duration=50), "an animation"
    yield "animated-forever.gif", saved(scene(), "GIF", save_all=True, append_images=frames * 30, loop=0), "91 frames"


def _shapes() -> Iterator[tuple[str, bytes, str]]:
    for width, height in ((1, 1), (1, 2), (3, 1), (1, 60_000), (60_000, 1), (2, 9_000), (224, 224), (225, 223)):
        yield f"{width}x{height}.png", saved(scene(width=width, height=height), "PNG"), "an unusual shape"


def _orientations() -> Iterator[OddFile]:
    for tag in range(10):
        exif = Image.Exif()
        exif[_ORIENTATION] = tag
        for suffix, kind in (("jpg", "JPEG"), ("webp", "WEBP"), ("png", "PNG"))[: 3 if tag in (0, 6, 9) else 1]:
            content = saved(scene(), kind, exif=exif.tobytes())
            yield OddFile(f"orientation-{tag}.{suffix}", content, "readable", "turned by its metadata")
    for name, block in (
        ("noise", b"Exif\0\0" + bytes(range(200))),
        ("short", b"Exif\0\0II*"),
        ("nothing", b"Exif\0\0"),
        ("loop", b"Exif\0\0II*\0\x08\0\0\0\0\0\x08\0\0\0"),
        ("far", b"Exif\0\0MM\0*\xff\xff\xff\xf0"),
        ("text", b"Exif\0\0II*\0\x08\0\0\0\x01\0" + struct.pack("<HHI4s", _ORIENTATION, 2, 4, b"six\0") + bytes(4)),
        ("many", b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + bytes(3000)),
    ):
        jpeg = sound_files()["jpg"]
        segment = b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block
        yield OddFile(f"exif-{name}.jpg", jpeg[:2] + segment + jpeg[2:], "readable", "damaged metadata")


def _out_of_range() -> Iterator[OddFile]:
    """Valid files with values that look like errors, or of kinds that cannot be displayed."""
    for name, values in (("nan", _FLOATS * np.float32("nan")), ("large", _FLOATS * 1e6), ("negative", _FLOATS - 1)):
        yield OddFile(f"float-{name}.tif", saved(Image.fromarray(values), "TIFF"), "error", "floats out of range")
    negative = np.full((30, 40), -5, np.int32)
    yield OddFile("integer-negative.tif", saved(Image.fromarray(negative), "TIFF"), "error", "integers out of range")
    yield OddFile("ycbcr.tif", saved(scene("YCbCr"), "TIFF"), "either", "YCbCr, which Pillow writes and does not read")
    yield OddFile("lab.tif", saved(Image.merge("LAB", scene().split()), "TIFF"), "either", "Lab colours")
    no_palette = _png(4, 4, bits=8, colours=_PALETTE, rows=bytes(5) * 4)
    yield OddFile("without-palette.png", no_palette, "either", "colours of a palette that is not there")
    jpeg = sound_files()["jpg"]
    frame = next(start for marker, start, _ in jpeg_markers(jpeg) if marker == 0xC0)
    arithmetic = jpeg[: frame + 1] + b"\xc9" + jpeg[frame + 2 :]
    yield OddFile("arithmetic.jpg", arithmetic, "either", "says that it is coded arithmetically, and is not")
    deep = jpeg[: frame + 4] + b"\x0c" + jpeg[frame + 5 :]
    yield OddFile("12-bit.jpg", deep, "error", "says that it has 12 bits")


def _png(width: int, height: int, *, bits: int, colours: int, rows: bytes, interlaced: bool = False) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, interlaced)
    data = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


def _deep_png() -> bytes:
    rows = b"".join(b"\0" + struct.pack(">60H", *range(row, 60_000 + row, 1000)) for row in range(20))
    return _png(20, 20, bits=16, colours=_RGB, rows=rows)


def _interlaced_png() -> bytes:
    """A PNG of 2 x 2 pixels, which take part in three of the seven passes."""
    red, green, blue, grey = b"\xff\0\0", b"\0\xff\0", b"\0\0\xff", b"\x80" * 3
    return _png(2, 2, bits=8, colours=_RGB, rows=b"\0" + red + b"\0" + green + b"\0" + blue + grey, interlaced=True)


def _rechunked(content: bytes) -> bytes:
    start = content.index(b"IDAT") - 4
    (length,) = struct.unpack(">I", content[start : start + 4])
    data = content[start + 8 : start + 8 + length]
    pieces = b"".join(chunk(b"IDAT", data[at : at + 1]) for at in range(len(data)))
    return content[:start] + pieces + content[start + 12 + length :]


def _without(jpeg: bytes, unwanted: int) -> bytes:
    return b"".join(jpeg[start:end] for marker, start, end in jpeg_markers(jpeg) if marker != unwanted)


def _with_adobe_transform(jpeg: bytes, transform: int) -> bytes:
    start = next(start for marker, start, _ in jpeg_markers(jpeg) if marker == 0xEE)
    at = start + 4 + 11  # after "Adobe", version and two flags
    return jpeg[:at] + bytes([transform]) + jpeg[at + 1 :]
