"""Picture files without what is not needed for their pixels, so that only damage of the pixels refuses a picture.

Formats: https://www.w3.org/TR/png-3, https://developers.google.com/speed/webp/docs/riff_container, ITU-T T.81.
"""

import re
import struct
import zlib
from itertools import islice
from typing import Final

from llama_adapter.runtime.text import shown_text

JPEG_END: Final = b"\xff\xd9"
_START: Final = re.compile(rb"\xff\xd8\xff[\xc0-\xfe]|\x89PNG\r\n\x1a\n|GIF8[79]a|RIFF....WEBPVP8[ LX]", re.DOTALL)
_MAX_BYTES_BEFORE: Final = 4096
_JPEG_METADATA: Final = (*range(0xE2, 0xEE), 0xEF, 0xFE)  # without JFIF, EXIF and Adobe's marker of colours
FRAMES: Final = (0xC0, 0xC1, 0xC2)  # markers of the JPEGs that Pillow decodes
_SCAN: Final = re.compile(rb"\xff\xda\x00([\x08\x0a\x0c\x0e]).", re.DOTALL)


def picture_start(data: bytes) -> int:
    """Where a picture begins behind other bytes, such as a line of text before a JPEG; 0 if there is none."""
    found = _START.search(data, 0, _MAX_BYTES_BEFORE + 16)  # 16: the longest signature
    return found.start() if found and found.start() <= _MAX_BYTES_BEFORE else 0


def bare_picture(data: bytes) -> tuple[bytes, str]:
    """The file without what its pixels and orientation do not need, and a fault of the pixels, or ""."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _bare_png(data)
    return (_whole_webp(data) if data.startswith(b"RIFF") and data[8:12] == b"WEBP" else data), ""


def _bare_png(data: bytes) -> tuple[bytes, str]:
    view, kept, at, fault, kind = memoryview(data), [memoryview(data[:8])], 8, "", b""
    while at + 8 <= len(data) and kind != b"IEND":
        length, kind = struct.unpack_from(">I4s", data, at)
        body, checksum = view[at + 4 : at + 8 + length], view[at + 8 + length : at + 12 + length]
        right = struct.pack(">I", zlib.crc32(body))
        if kind[:1].isupper() and (kind != b"PLTE" or data[25] == 3):  # 3: the colours are in a palette
            if len(checksum) == len(right) and checksum != right:  # the file may end in the checksum
                fault = f"the checksum of {shown_text(kind.decode(errors='replace'))} is wrong"
            kept += [memoryview(struct.pack(">I", len(body) - 4)), body, memoryview(right)]
        elif checksum == right and kind in (b"tRNS", b"eXIf"):
            kept.append(view[at : at + 12 + length])
        at += 12 + length
    return b"".join(kept), fault


def _whole_webp(data: bytes) -> bytes:
    """Without metadata that the file's end cuts off, and with the last byte of padding; unchanged if pixels are cut."""
    kept: list[bytes] = []
    at, has_frame = 12, False
    while at + 8 <= len(data) < 8 + int.from_bytes(data[4:8], "little"):
        kind, length = struct.unpack_from("<4sI", data, at)
        if at + 8 + length > len(data):
            if kind in (b"ICCP", b"EXIF", b"XMP ") or has_frame:
                break
            return data
        has_frame |= kind == b"ANMF"  # the first frame of an animation is enough
        kept.append(data[at : at + 8 + length] + b"\0" * (length % 2))
        at += 8 + length + length % 2
    chunks = b"".join(kept)
    return b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WEBP" + chunks if kept else data


def completed_jpegs(data: bytes) -> tuple[bytes, ...]:
    """A JPEG that Pillow refuses, without metadata; if its end is missing, with two ends.

    The bytes before these ends differ. If both JPEGs give the same pixels, no data of the pixels are missing. Returns
    nothing for other files, and for a JPEG without all of its scans.
    """
    kept, at, components = [data[:2]], 2, b""
    while data.startswith(b"\xff\xd8") and at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        marker, length = struct.unpack_from(">xBH", data, at)
        end = at + 1 if marker == 0xFF else at + 2 + length
        if marker in FRAMES:
            components = data[at + 10 : end : 3]
        if marker not in _JPEG_METADATA:
            kept.append(data[at:end])
        at = end
    bare = b"".join([*kept, data[at:]])
    if components and JPEG_END in data[at:]:
        return (bare,)
    sent = set()
    for scan in islice(_SCAN.finditer(data, at), 1000):
        # As in T.81, B.2.3: the coefficients from `first` to `last` of each component, whole if the last bit is sent.
        *named, first, last, bits = data[scan.end() : scan.end() + scan[1][0] - 3].ljust(5, b"\xff")
        if bits & 15 == 0:
            sent |= {(component, place) for component in named[::2] for place in range(first, last + 1)}
    if not components or not sent >= {(component, place) for component in components for place in range(64)}:
        return ()
    restarts = [b"\xff" + bytes([0xD0 + place]) for place in range(8)]
    return tuple(
        bare.rstrip(b"\xff") + fill + fill.join(restarts) + fill + JPEG_END for fill in (bytes(256), b"\xaa" * 256)
    )
