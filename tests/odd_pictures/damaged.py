"""Damaged pictures: cut off at every marker and chunk, joined, or with a wrong name. tests/fuzz flips bits."""

import random
import struct
from collections.abc import Iterator

from tests.bad_files import HTML, SVG
from tests.odd_pictures.samples import OddFile, saved, scene, sound_files

_STANDALONE_MARKERS = {0x01, *range(0xD0, 0xD9)}
_SCAN, _END = 0xDA, 0xD9


def damaged() -> Iterator[OddFile]:
    """All of them."""
    for name, options in (("baseline", {}), ("progressive", {"progressive": True})):
        yield from _cut_jpegs(name, saved(scene(), "JPEG", quality=80, exif=_camera(), **options))
    yield from _cut_pngs(saved(scene(width=256, height=192).rotate(30), "PNG", compress_level=0))
    yield from _joined()
    yield from _beginnings()
    yield from _other_kinds()


def jpeg_markers(content: bytes) -> Iterator[tuple[int, int, int]]:
    """For each marker: the byte that names it, where it begins, and where its segment ends."""
    at = 0
    while at < len(content):
        marker = content[at + 1]
        end = at + 2
        if marker not in _STANDALONE_MARKERS and marker != _END:
            (length,) = struct.unpack(">H", content[at + 2 : at + 4])
            end += length
        if marker == _SCAN:  # the data of a scan has no length; it ends at the next marker that is not part of it
            while content[end] != 0xFF or content[end + 1] in (0x00, *range(0xD0, 0xD8)):
                end += 1
        yield marker, at, end
        at = end


def png_chunks(content: bytes) -> Iterator[tuple[bytes, int, int]]:
    """For each chunk: its kind, where it begins and where it ends."""
    at = 8
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        yield content[at + 4 : at + 8], at, at + 12 + length
        at += 12 + length


def _cut_jpegs(name: str, content: bytes) -> Iterator[OddFile]:
    for index, (marker, start, end) in enumerate(jpeg_markers(content)):
        for where, cut in (("at", start), ("in", (start + end) // 2)):
            file_name = f"cut-{name}-{index:02}-{where}-{marker:02x}.jpg"
            expected = "readable" if marker == _END else "error"
            yield OddFile(file_name, content[:cut], expected, f"cut off {where} a marker")


def _cut_pngs(content: bytes) -> Iterator[OddFile]:
    data_ends = max(end for kind, _, end in png_chunks(content) if kind == b"IDAT")
    for index, (kind, start, end) in enumerate(png_chunks(content)):
        for where, cut in (("at", start), ("in", (start + end) // 2), ("before-checksum-of", end - 4)):
            expected = "error" if cut < data_ends - 4 else "either"
            name = f"cut-png-{index:02}-{where}-{kind.decode()}.png"
            yield OddFile(name, content[:cut], expected, f"cut off {where} a chunk")


def _joined() -> Iterator[OddFile]:
    jpeg, png = sound_files()["jpg"], sound_files()["png"]
    noise = random.Random(1).randbytes(5000)
    yield OddFile("two-jpegs.jpg", jpeg + jpeg, "readable", "two pictures one behind the other")
    yield OddFile("jpeg-and-more.jpg", jpeg + noise, "readable", "bytes behind the end")
    yield OddFile("png-and-more.png", png + noise, "readable", "bytes behind the end")
    yield OddFile("png-and-script.png", png + HTML, "readable", "a web page behind the end")
    yield OddFile("more-and-jpeg.jpg", noise[:100] + jpeg, "readable", "bytes before the beginning")
    yield OddFile("line-feed-and-png.png", b"\n" + png, "readable", "a line feed before the beginning")
    yield OddFile("as-text.png", png.replace(b"\r\n", b"\n"), "error", "line ends changed, as by a text transfer")
    yield OddFile("as-utf8.jpg", jpeg.decode("latin-1").encode(), "error", "taken for text and encoded")


def _beginnings() -> Iterator[OddFile]:
    yield OddFile("zero-bytes.png", b"", "error", "zero bytes")
    yield OddFile("zero-bytes.jpg", b"", "error", "zero bytes")
    yield OddFile("one-byte.jpg", b"\xff", "error", "one byte")
    yield OddFile("zeros.jpg", bytes(4096), "error", "a file that was never written")
    for name, content in (
        ("png-signature.png", b"\x89PNG\r\n\x1a\n"),
        ("jpeg-signature.jpg", b"\xff\xd8\xff"),
        ("gif-signature.gif", b"GIF89a"),
        ("webp-signature.webp", b"RIFF\x04\x00\x00\x00WEBP"),
        ("bmp-signature.bmp", b"BM"),
        ("tiff-signature.tif", b"II*\x00"),
        ("big-tiff-signature.tif", b"MM\x00+\x00\x08\x00\x00"),
        ("avif-signature.avif", b"\x00\x00\x00\x1cftypavif"),
        ("ppm-signature.ppm", b"P6\n"),
    ):
        yield OddFile(name, content, "error", "a signature and nothing else")


def _other_kinds() -> Iterator[OddFile]:
    for suffix, other in (("png", "jpg"), ("gif", "webp"), ("tif", "bmp")):
        for inside, name in ((suffix, other), (other, suffix)):
            content = sound_files()[inside]
            yield OddFile(f"{inside}-inside.{name}", content, "readable", "a picture of another format")
    for name, content in (
        ("text.png", b"These are words.\n"),
        ("page.jpg", HTML),
        ("drawing.png", SVG),
        ("document.jpg", b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n%%EOF\n"),
        ("archive.png", b"PK\x03\x04" + bytes(60)),
        ("program.jpg", b"\x7fELF\x02\x01\x01" + bytes(80)),
        ("photo.heic.jpg", b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic"),
        ("film.jpg", b"\x00\x00\x00\x18ftypmp42\x00\x00\x00\x00mp42isom"),
        ("jpeg2000.jpg", b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(40)),
        ("layers.png", b"8BPS\x00\x01" + bytes(40)),
        ("icon.png", b"\x00\x00\x01\x00\x01\x00" + bytes(40)),
        ("postscript.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) run\n"),
        ("pointer.jpg", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"),
    ):
        yield OddFile(name, content, "error", "no picture that is read here")


def _camera() -> bytes:
    exif = scene().getexif()
    exif[0x010F] = "Camera"
    return exif.tobytes()
