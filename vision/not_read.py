"""Identifies files that Pillow does not decode: other kinds of files, and rare kinds of JPEG and PNG.

`rare_kind` distinguishes a rare kind from a damaged file without a decoder. A rare kind has its end marker, and its
header names a feature that cannot be decoded here.
"""

import re
import struct
from typing import Final

from llama_adapter.vision.containers import FRAMES, JPEG_END

# Offset, signature and kind of files that are often stored with pictures. The first that fits counts: `ftypcrx ` is
# before `ftyp`.
_OTHER_FILES: Final = (
    (0, b"\x00\x00\x00\x0cjP  ", "a JPEG 2000 picture"),
    (0, b"\x00\x00\x00\x0cJXL ", "a JPEG XL picture"),
    (0, b"#?RADIANCE", "a Radiance HDR picture"),
    (0, b"SIMPLE  =", "a FITS picture"),
    (0, b"gimp xcf", "a GIMP file"),
    (0, b"\x8aMNG\r\n\x1a\n", "an MNG animation"),
    *((0, head, "a raw file of a camera") for head in (b"FUJIFILMCCD-RAW", b"IIRO\x08", b"IIU\x00", b"FOVb")),
    *((4, b"ftypcrx ", "a raw file of a camera"), (128, b"DICM", "a DICOM picture"), (0, b"icns", "an icon file")),
    *((4, head, "a video") for head in (b"ftyp", b"moov", b"mdat")),
    *((0, head, "a video") for head in (b"\x1a\x45\xdf\xa3", b"\x30\x26\xb2\x75", b"\x00\x00\x01\xba", b"FLV\x01")),
    *((8, b"AVI LIST", "a video"), (0, b"OggS", "a video or sound file"), (0, b"ID3", "a sound file")),
    (0, b"\x00\x05\x16\x07\x00", "a file of macOS beside another file (AppleDouble)"),
    (0, b"\xff\x4f\xff\x51", "a JPEG 2000 picture"),
    (0, b"II\xbc\x01", "a JPEG XR picture"),
    (0, b"\x76\x2f\x31\x01", "an OpenEXR picture"),
    (0, b"DDS |\x00\x00\x00", "a DirectDraw surface"),
    (0, b"\xff\x0a", "a JPEG XL picture"),
    (0, b"8BPS", "a Photoshop file"),
    (0, b"qoif", "a QOI picture"),
    (0, b"\x00\x00\x01\x00", "an icon file"),
    (0, b"%PDF", "a PDF document"),
    (0, b"%!PS", "a PostScript document"),
    (0, b"/* XPM */", "an XPM picture"),
)
_ARCHIVES: Final = (
    *((0, b"PK" + head, "zip") for head in (b"\x03\x04", b"\x05\x06", b"\x07\x08")),
    *((257, b"ustar", "tar"), (0, b"\x1f\x8b\x08", "gzip"), (0, b"BZh", "bzip2")),
    *((0, b"\xfd7zXZ\x00", "xz"), (0, b"\x28\xb5\x2f\xfd", "zstd")),
    *((0, b"7z\xbc\xaf\x27\x1c", "7z"), (0, b"Rar!\x1a\x07", "rar")),
)
_PAGES: Final = {
    "a web page (HTML)": rb"(?i)<!doctype html|<html|^\s*<(head|body|title|h1|p|div|pre|script)\b",
    "XML": rb"(?i)^\s*<(\?xml\b|[a-z][\w:.-]*[\s>/])",
    "JSON": rb"^\s*(\{\s*[\"}]|\[\s*[\[{\"\]\dnft])",
    "plain text": rb"\A(?!P[1-3]\s)[\t\n\r\x20-\x7e\x80-\xff]+\Z",
}
_HEIC_BRANDS: Final = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_SIGNATURES: Final = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    *((prefix, "TIFF") for prefix in (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")),
)
_BMP_HEADER_SIZES: Final = range(16, 257)
_ONE_PLANE: Final = b"\x01\x00"


def is_heic(data: bytes) -> bool:
    """Whether these bytes begin like a HEIC picture."""
    return data[4:8] == b"ftyp" and data[8:12] in _HEIC_BRANDS


def begins_like(data: bytes) -> str | None:
    """The format whose signature these bytes begin with, or None.

    Signatures of two letters (BM, P6) are too short, because plain text may begin with them. Therefore a BMP also needs
    a plausible header.
    """
    if data.startswith(b"RIFF") and b"WEBP".startswith(data[8:12]):
        return "WEBP"
    if data[4:12] in (b"ftypavif", b"ftypavis"):
        return "AVIF"
    if _is_bmp(data):
        return "BMP"
    return next((name for signature, name in _SIGNATURES if data.startswith(signature)), None)


def other_file(data: bytes) -> str | None:
    """The kind of a file in a format that is not read here, such as "a PDF document", or None."""
    for offset, signature, kind in _OTHER_FILES:
        if data.startswith(signature, offset):
            return kind
    head = data[:1024]
    if b"<svg" in head.lower() and b"<html" not in head.lower():
        return "an SVG drawing"
    if data.startswith(b"P7\n") and b"\nENDHDR\n" in head:
        return "a PAM picture"
    if re.match(rb"PF4?\s+\d+\s+\d+\s", head):
        return "a PFM picture in colour"
    if re.match(rb"#define \w+_width \d+\s", head):
        return "an XBM picture"
    if data.startswith(b"BA") and data[14:16] == b"BM":
        return "an OS/2 bitmap array"
    return None


def archive_kind(data: bytes) -> str | None:
    """The format of an archive or compressed file, such as "zip", or None."""
    return next((kind for offset, signature, kind in _ARCHIVES if data.startswith(signature, offset)), None)


def page_kind(data: bytes) -> tuple[str, str] | None:
    """What a text or archive saved as a picture is, and what to do about it; None for other files."""
    if kind := archive_kind(data):
        return f"is an archive ({kind})", "unpack it"
    head = data[:1024].removeprefix(b"\xef\xbb\xbf")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        head = head.decode("utf-16", errors="ignore").encode(errors="ignore")
    if head.startswith(b"/annex/objects/"):
        return "is a pointer of git-annex in place of the picture", "run `git annex get`"
    if head.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS in place of the picture", "run `git lfs pull`"
    again = "it may be an error message of a server: download the picture again"
    return next(((f"looks like {kind}", again) for kind, page in _PAGES.items() if re.search(page, head)), None)


def _is_bmp(data: bytes) -> bool:
    if not data.startswith(b"BM") or len(data) < 26:
        return False
    header_size = struct.unpack_from("<I", data, 14)[0]
    if header_size == 12:
        return data[22:24] == _ONE_PLANE
    return header_size in _BMP_HEADER_SIZES and len(data) >= 14 + header_size and data[26:28] == _ONE_PLANE


def rare_kind(data: bytes) -> str | None:
    """The kind of a complete JPEG or PNG that is not decoded here, such as "a JPEG with 12 bits per value", or None.

    None means that the file is damaged, or of a kind that can be decoded. Call this function only after a failure.
    """
    match begins_like(data):
        case "JPEG":
            return _rare_jpeg(data)
        case "PNG":
            return "a PNG in Apple's own form (CgBI)" if data[12:16] == b"CgBI" and b"IEND" in data[-12:] else None
    return None


_JPEG_KINDS: Final = {  # by the marker of the frame
    **{0xC0: "baseline JPEG", 0xC1: "sequential JPEG", 0xC2: "progressive JPEG", 0xC3: "lossless JPEG"},
    **dict.fromkeys((0xC5, 0xC6, 0xC7), "hierarchical JPEG"),
    **dict.fromkeys((0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF), "JPEG with arithmetic coding"),
    0xF7: "JPEG-LS picture",
}
_DECODED_NUM_COMPONENTS: Final = (1, 3, 4)


def _rare_jpeg(data: bytes) -> str | None:
    at = 2
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # padding before a marker
            at += 1
            continue
        if marker in _JPEG_KINDS:
            break
        at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    else:
        return None
    if data.rfind(JPEG_END, at) < 0:
        return None
    bits, num_components = data[at + 4], data[at + 9]
    if marker in FRAMES and bits == 8 and num_components in _DECODED_NUM_COMPONENTS:
        return None
    components = "1 component" if num_components == 1 else f"{num_components} components"
    return f"a {_JPEG_KINDS[marker]} ({components} of {bits} bits)"
