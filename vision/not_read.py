"""Identifies files that Pillow does not decode: other kinds of files, and rare kinds of JPEG, TIFF, BMP and PNG.

`rare_kind` distinguishes a rare kind from a damaged file without a decoder. A rare kind has its end marker or all bytes
that its header declares, and its header names a feature that cannot be decoded here.
"""

import re
import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

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
    if _bmp_header(data) is not None:
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


def rare_kind(data: bytes, *, was_opened: bool) -> str | None:
    """The kind of a complete file that cannot be decoded here, such as "a JPEG with 12 bits per value", or None.

    None means that the file is damaged, or of a kind that can be decoded. `was_opened` says whether Pillow read the
    header and failed later. Call this function only after a failure, because it also names rare features that
    Pillow does decode.
    """
    match begins_like(data):
        case "JPEG":
            return _rare_jpeg(data)
        case "TIFF":
            return _rare_tiff(data, was_opened=was_opened)
        case "BMP":
            return _rare_bmp(data)
        case "PNG":
            return "a PNG in Apple's own form (CgBI)" if data[12:16] == b"CgBI" and b"IEND" in data[-12:] else None
    return None


# JPEG

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


# TIFF

_WIDTH, _HEIGHT = 256, 257
_DEFAULTS: Final = {258: 1, 259: 1, 262: 0, 277: 1, 339: 1}  # bits, compression, colour model, samples and their format
_DATA_PLACES: Final = ((273, 279), (324, 325))  # tags with offsets and sizes in bytes: of strips, of tiles
_TIFF_TYPES: Final = {1: "u1", 3: "u2", 4: "u4", 16: "u8"}  # types of the entries that are read here
_MOST_ENTRIES: Final = 65_535
_OLD_JPEG, _JPEG, _YCBCR = 6, 7, 6
_COMPRESSIONS: Final = {
    **{1: "none", 2: "CCITT RLE", 3: "CCITT fax 3", 4: "CCITT fax 4", 5: "LZW", 6: "old JPEG", 7: "JPEG"},
    **{8: "deflate", 9: "JBIG", 10: "JBIG", 32771: "CCITT RLE/W", 32773: "PackBits", 32809: "ThunderScan"},
    **{32946: "deflate", 34661: "JBIG", 34676: "SGILog", 34677: "SGILog24", 34712: "JPEG 2000", 34887: "LERC"},
    **{34892: "lossy JPEG", 34925: "LZMA", 34933: "PNG", 34934: "JPEG XR", 50000: "ZSTD", 50001: "WebP"},
    **{22610: "JPEG XR", 50002: "JPEG XL", 50013: "Pixtiff", 52546: "JPEG XL"},
}
_DECODED_COMPRESSIONS: Final = (1, 2, 3, 4, 5, 7, 8, 32773, 32946, 34925, 50000)
_SAMPLE_FORMATS: Final = {1: "unsigned integers", 2: "signed integers", 3: "floats", 5: "complex", 6: "complex floats"}
_PHOTOMETRICS: Final = {
    **{0: "grey", 1: "grey", 2: "RGB", 3: "palette", 4: "mask", 5: "CMYK", 6: "YCbCr", 8: "CIELab", 9: "ICCLab"},
    **{10: "ITULab", 32803: "colour filter array", 32844: "LogL", 32845: "LogLuv", 34892: "linear raw"},
}


def _rare_tiff(data: bytes, *, was_opened: bool) -> str | None:
    tags = _first_page(data)
    if not _has_all_data(data, tags):
        return None
    bits, compression, photometric, samples, kind = (int(tags.get(tag, [value])[0]) for tag, value in _DEFAULTS.items())
    is_decoded = (
        compression in _DECODED_COMPRESSIONS
        and (photometric != _YCBCR or compression == _JPEG)
        and (compression != _JPEG or bits == 8)
    )
    if was_opened and is_decoded:
        return None
    return (
        f"a TIFF with {'1 value' if samples == 1 else f'{samples} values'} per pixel "
        f"({bits}-bit {_SAMPLE_FORMATS.get(kind, 'values of no known format')}, "
        f"{_PHOTOMETRICS.get(photometric, f'colour model {photometric}')}, "
        f"compression {_COMPRESSIONS.get(compression, compression)})"
    )


def _first_page(data: bytes) -> dict[int, NDArray[np.unsignedinteger]]:
    """The integer tags of a TIFF's first page; none if one is outside the file. Pillow's reader skips such a tag."""
    order = "<" if data.startswith(b"II") else ">"
    is_big = b"+" in data[2:4]
    # For BigTIFF and TIFF: the position of the first page's offset, and the formats of the number of entries, of an
    # entry and of an offset.
    at_place, num_format, entry_format, place_format = (8, "Q", "HHQ", "Q") if is_big else (4, "H", "HHI", "I")
    tags = dict[int, NDArray[np.unsignedinteger]]()
    try:
        at = struct.unpack_from(order + place_format, data, at_place)[0]
        num_entries = struct.unpack_from(order + num_format, data, at)[0]
        at += struct.calcsize(order + num_format)
        for _ in range(min(num_entries, _MOST_ENTRIES)):
            tag, type_code, count = struct.unpack_from(order + entry_format, data, at)
            at += struct.calcsize(order + entry_format)
            if type_code in _TIFF_TYPES and count > 0:
                dtype = np.dtype(order + _TIFF_TYPES[type_code])
                is_inside = count * dtype.itemsize <= struct.calcsize(order + place_format)
                place = at if is_inside else struct.unpack_from(order + place_format, data, at)[0]
                tags[tag] = np.frombuffer(data, dtype, count, place)
            at += struct.calcsize(order + place_format)
    except (struct.error, ValueError, OverflowError):
        return {}
    return tags


def _has_all_data(data: bytes, tags: dict[int, NDArray[np.unsignedinteger]]) -> bool:
    """Whether the page has a size, and all its strips or tiles are inside the file."""
    if not all(tag in tags and tags[tag][0] > 0 for tag in (_WIDTH, _HEIGHT)):
        return False
    for offsets_tag, sizes_tag in _DATA_PLACES:
        if offsets_tag in tags and sizes_tag in tags:
            offsets, sizes = tags[offsets_tag].astype(np.float64), tags[sizes_tag].astype(np.float64)
            return len(offsets) == len(sizes) and bool(np.all(offsets + sizes <= len(data)))
    return False


# BMP

_BMP_COMPRESSIONS: Final = {
    **{0: "none", 1: "RLE8", 2: "RLE4", 3: "bit fields", 4: "JPEG", 5: "PNG", 6: "bit fields with alpha"},
    **{11: "CMYK", 12: "CMYK RLE8", 13: "CMYK RLE4"},
}
_OS2_COMPRESSIONS: Final = {(64, 1, 3): "Huffman 1D", (64, 24, 4): "RLE24"}  # by header size, bits and compression
_PLAIN_COMPRESSIONS: Final = (0, 3, 6, 11)
_BMP_HEADER_SIZES: Final = range(12, 257)
_RLE_COMPRESSIONS: Final = (1, 2)
_RLE_END: Final = b"\x00\x01"


def _bmp_header(data: bytes) -> tuple[int, int, int, int, int, int] | None:
    """Header size, width, height, bits per pixel, compression and bytes of pixels; None if it is not a BMP."""
    if not data.startswith(b"BM") or len(data) < 26:
        return None
    header_size = struct.unpack_from("<I", data, 14)[0]
    if header_size == 12:
        width, height, planes, bits = struct.unpack_from("<4H", data, 18)
        compression = num_bytes = 0
    elif header_size in _BMP_HEADER_SIZES and len(data) >= 14 + header_size:
        # A header of OS/2 may be shorter; missing fields are 0.
        fields = data[18 : 14 + header_size].ljust(20, b"\0")
        width, height, planes, bits, compression, num_bytes = struct.unpack_from("<iiHHII", fields)
    else:
        return None
    return (header_size, width, height, bits, compression, num_bytes) if planes == 1 else None


def _rare_bmp(data: bytes) -> str | None:
    header = _bmp_header(data)
    if header is None:
        return None
    header_size, width, height, bits, compression, num_bytes = header
    file_size, start = struct.unpack_from("<I4xI", data, 2)
    name = _OS2_COMPRESSIONS.get((header_size, bits, compression), _BMP_COMPRESSIONS.get(compression, "not known"))
    if compression in _PLAIN_COMPRESSIONS and (header_size, bits, compression) not in _OS2_COMPRESSIONS:
        end = start + (abs(width) * bits + 31) // 32 * 4 * abs(height)
    else:
        end = start + num_bytes if num_bytes else file_size
    if not 0 < start < end <= len(data):
        return None
    if compression in _RLE_COMPRESSIONS and _RLE_END not in data[max(0, end - 4) : end]:
        return None
    return f"a {bits}-bit BMP (compression {name}, a header of {header_size} bytes)"
