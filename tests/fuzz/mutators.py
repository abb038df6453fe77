"""Changes to good inputs, drawn by hypothesis: bytes, JSON, lines, zips, safetensors, PNG, JPEG and tar.

Each mutator takes hypothesis's `draw` and an input, and returns another input. It changes the content inside the
container. Most of the time it corrects checksums and lengths afterwards; otherwise nearly every change would fail at
the first check.
"""

import copy
import gzip
import io
import json
import re
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hypothesis.strategies import (
    DrawFn,
    binary,
    booleans,
    dictionaries,
    floats,
    integers,
    lists,
    none,
    permutations,
    recursive,
    sampled_from,
    text,
)

from tests.bad_files import chunk

Mutator = Callable[[DrawFn, bytes], bytes]

_LENGTHS = sampled_from((0, 0, 1, 2, 4, 8, 16, 64, 256, 4096))
_COPIES = sampled_from((2, 2, 17, 50))
_NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)
_PACKED = [
    number.to_bytes(width, order)
    for number in _NUMBERS
    for width in (1, 2, 4, 8)
    for order in ("little", "big")
    if number < 256**width
]
_RAW = "@raw:{}@"  # values that the json module cannot write
_JSON_VALUES = (
    *("\0", "\n", "\x1b[31m", "\u202e", "\ud800", "😀", "x" * 300, "../..", "/etc/passwd", 2**63, 10**30, 1e308, -0.0),
    *({"": None}, {"path": "/etc/passwd"}, {"type": "text"}),
    *(_RAW.format(value) for value in ("NaN", "1e999", "9" * 400, "9" * 5_000, "1.0", "[" * 2_000)),
)
_ANY_JSON = recursive(
    none() | booleans() | integers() | floats() | text(max_size=8),
    lambda inner: lists(inner, max_size=3) | dictionaries(text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def words(text: str) -> list[str]:
    """The words of a text, used as tokens by a mutator."""
    return text.split()


def one_of(draw: DrawFn, values: Sequence[Any]) -> Any:
    """One of values that differ each time. `sampled_from` would look at each of them."""
    return values[draw(integers(0, len(values) - 1))]


def one_in(draw: DrawFn, number: int) -> bool:
    return draw(integers(1, number)) == number


def mutated_bytes(*tokens: bytes, most: int = 4) -> Mutator:
    """Remove, repeat, move, overwrite and insert pieces; `tokens` are pieces with a meaning in the format."""
    pieces = sampled_from(_PACKED) | binary(max_size=8) | sampled_from(tokens or _PACKED)

    def mutate(draw: DrawFn, data: bytes) -> bytes:
        for _ in range(draw(integers(1, most))):
            start, other, length = draw(integers(0, len(data))), draw(integers(0, len(data))), draw(_LENGTHS)
            end, piece = start + length, b""
            match draw(integers(0, 9)):
                case 0:  # the rest is cut off
                    end = len(data)
                case 1:
                    end += 1
                case 2:
                    piece = data[start:end] * draw(_COPIES)
                case 3:
                    piece = data[other : other + length]
                case 4 | 5:
                    end, piece = start + 1, bytes(byte ^ 1 << draw(integers(0, 7)) for byte in data[start : start + 1])
                case 6 | 7 | 8:
                    piece = draw(pieces)
                    end = start + len(piece)
                case _:
                    piece = draw(pieces)
            data = data[:start] + piece + data[end:]
        return data

    return mutate


def flipped(draw: DrawFn, data: bytes) -> bytes:
    """Set one to three bytes, so that all lengths stay correct."""
    content = bytearray(data)
    for _ in range(draw(integers(1, 3)) if data else 0):
        content[draw(integers(0, len(data) - 1))] = draw(integers(0, 255))
    return bytes(content)


def either(*mutators: Mutator) -> Mutator:
    """Use one of these mutators each time; a mutator that is given twice is used more often."""
    return lambda draw, data: one_of(draw, mutators)(draw, data)


# JSON


def mutated_json(*words: Any) -> Mutator:
    """Replace, remove, rename, copy and nest values; `words` are keys and values with a meaning in the format."""
    as_bytes = mutated_bytes(b'"', b",", b"{", b"}", b"[", b"]", b"\\", b"\\ud800", b"null", b"NaN", b"\xef\xbb\xbf")
    new = _ANY_JSON | sampled_from((*_JSON_VALUES, *words)) | sampled_from(words or _JSON_VALUES)
    keys = sampled_from([str(word) for word in words] or ["x"]) | text(max_size=3)

    def mutate(draw: DrawFn, data: bytes) -> bytes:
        try:
            root = [json.loads(data)]
            for _ in range(draw(integers(1, 3))):
                _change_value(draw, root, new, keys)
            changed = json.dumps(root[0] if root else None, ensure_ascii=draw(booleans()))
        except (ValueError, OverflowError, RecursionError):
            return as_bytes(draw, data)
        changed = re.sub(f'"{_RAW.format("(.*?)")}"', r"\1", changed)
        told = changed.encode(errors="surrogatepass" if one_in(draw, 5) else "backslashreplace")
        return as_bytes(draw, told) if one_in(draw, 7) else told

    return mutate


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Each container inside a container, with each of its keys."""
    for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
        yield holder, key
        if isinstance(holder[key], dict | list):
            yield from _places(holder[key])


def _change_value(draw: DrawFn, root: list[Any], new: Any, keys: Any) -> None:
    """Make one change somewhere in a value."""
    places = list(_places(root)) or [([None], 0)]
    parent, key = one_of(draw, places)
    other, its = one_of(draw, places)
    match draw(integers(0, 7)):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[draw(keys)] = copy.deepcopy(other[its])
        case 1:
            parent.insert(key, copy.deepcopy(other[its]))
        case 2:
            parent[key] = copy.deepcopy(other[its])
        case 3:
            parent[key] = [copy.deepcopy(parent[key]) for _ in range(draw(_COPIES))]
        case 4:
            parent[key] = {draw(keys): parent[key]}
        case 5 if isinstance(parent[key], str):
            at = draw(integers(0, len(parent[key])))
            parent[key] = parent[key][:at] + str(draw(new))[:400] + parent[key][at + draw(integers(0, 5)) :]
        case 5 if isinstance(parent[key], int | float):
            parent[key] = one_of(draw, (-parent[key], parent[key] + 1, parent[key] * 1000, parent[key] / 2))
        case _:
            parent[key] = copy.deepcopy(draw(new))


# Lines


def mutated_lines(inner: Mutator) -> Mutator:
    """Change lines with `inner`; remove, repeat, move, join and insert them; use line ends of other systems."""

    def mutate(draw: DrawFn, data: bytes) -> bytes:
        lines = data.split(b"\n")
        at, other = draw(integers(0, len(lines) - 1)), draw(integers(0, len(lines) - 1))
        match draw(integers(0, 8)):
            case 0:
                del lines[at]
            case 1:
                lines[at:at] = [lines[other]] * draw(_COPIES)
            case 2:
                lines[at], lines[other] = lines[other], lines[at]
            case 3:
                return draw(sampled_from((b" ", b"", b"\r", b"\r\n", b"\0", b"\n\n"))).join(lines)
            case 4:
                lines[at] += draw(sampled_from((b"\r", b" ", b"\0", b"#", b",", b"}")))
            case 5:
                lines[at:at] = [draw(sampled_from((b"", b" ", b"# x", b"null", b"[]", b"{}", b"\xff")))]
            case 6:
                lines[at : at + 2] = [draw(sampled_from((b"", b" ", b","))).join(lines[at : at + 2])]
            case _:
                lines[at] = inner(draw, lines[at])
        return b"\n".join(lines)

    return mutate


# Containers


def mutated_zip(inner: Mapping[str, Mutator], *, names: Sequence[str] = ()) -> Mutator:
    """Change entries with the mutator for the end of their name ("" for others); rename, duplicate, remove or compress.

    `names` are names with a meaning in the format.
    """
    as_bytes = mutated_bytes(b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07")

    def mutate(draw: DrawFn, data: bytes) -> bytes:
        if one_in(draw, 5):
            return as_bytes(draw, data)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
        except Exception:
            return as_bytes(draw, data)
        if not entries:
            return as_bytes(draw, data)
        at = draw(integers(0, len(entries) - 1))
        name, content = entries[at]
        match draw(integers(0, 7)):
            case 0:
                del entries[at]
            case 1:
                entries.append((name, one_of(draw, entries)[1]))
            case 2:
                name = one_of(draw, (*names, name + "x", name[1:], "", "../" + name, "/" + name))
                entries[at] = (name, content)
            case 3 if names:
                entries.append((draw(sampled_from(names)), content))
            case _:
                change = next(mutator for end, mutator in inner.items() if name.endswith(end))
                entries[at] = (name, change(draw, content))
        method = zipfile.ZIP_DEFLATED if one_in(draw, 5) else zipfile.ZIP_STORED
        link = draw(integers(0, 50))  # the number of an entry that becomes a symbolic link
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", method) as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about duplicate names
            for number, (name, content) in enumerate(entries):
                entry = zipfile.ZipInfo(name.encode(errors="replace").decode())
                entry.compress_type = method
                if number == link - 1:
                    entry.external_attr = 0o120777 << 16
                archive.writestr(entry, content)
        return packed.getvalue()

    return mutate


def mutated_safetensors(header: Mutator) -> Mutator:
    """Change the header as JSON, most of the time with a correct length; cut or extend the data."""
    as_bytes = mutated_bytes()

    def mutate(draw: DrawFn, data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        if len(data) < 8 + length or one_in(draw, 10):
            return as_bytes(draw, data)
        text, numbers = data[8 : 8 + length], data[8 + length :]
        if one_in(draw, 7):
            numbers = one_of(draw, (numbers[:-1], numbers + b"\0" * 8, b"", as_bytes(draw, numbers)))
        else:
            text = header(draw, text)
        said = draw(sampled_from(_NUMBERS)) if one_in(draw, 20) else len(text)
        return said.to_bytes(8, "little") + text + numbers

    return mutate


def mutated_metadata(*words: Any) -> Mutator:
    """Mutate a text of a safetensors header's metadata as JSON. The length stays correct."""
    as_json = mutated_json(*words)

    def mutate(draw: DrawFn, data: bytes) -> bytes:
        try:
            (size,) = struct.unpack_from("<Q", data)
            header = json.loads(data[8 : 8 + size])
            texts = header["__metadata__"]
            name = one_of(draw, sorted(texts))
            texts[name] = as_json(draw, texts[name].encode()).decode(errors="replace")
            changed = json.dumps(header).encode()
        except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
            return flipped(draw, data)
        return struct.pack("<Q", len(changed)) + changed + data[8 + size :]

    return mutate


_PNG_KINDS = sampled_from(b"tEXt zTXt iTXt iCCP eXIf acTL fcTL PLTE tRNS sRGB".split())
_JPEG_MARKERS = sampled_from((0xC0, 0xC2, 0xC4, 0xDB, 0xDD, 0xE0, 0xE1, 0xE2, 0xEE, 0xFE)) | integers(0, 255)
_as_piece = mutated_bytes(most=2)
_as_scan = mutated_bytes(b"\xff\xd9", b"\xff\xda", b"\xff\xd0", b"\xff\x00")


def _moved(draw: DrawFn, pieces: list[Any], at: int) -> bool:
    """Remove, repeat or move a piece, or leave them all as they are; returns whether they were changed."""
    match draw(integers(0, 7)):
        case 0:
            del pieces[at]
        case 1:
            pieces[at:at] = [one_of(draw, pieces)] * draw(_COPIES)
        case 2 if len(pieces) < 100:
            pieces[:] = draw(permutations(pieces))
        case _:
            return False
    return True


def mutated_png(draw: DrawFn, data: bytes) -> bytes:
    """Change the content of chunks, also inside compressed data; move, duplicate and insert chunks.

    Checksums are correct.
    """
    signature, chunks, at = data[:8], list[tuple[bytes, bytes]](), 8
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    if not chunks:
        return mutated_bytes()(draw, data)
    place = draw(integers(0, len(chunks) - 1))
    kind, content = chunks[place]
    if not _moved(draw, chunks, place):
        match draw(integers(0, 4)):
            case 0:
                packed = (content[:64], b"k\0\0" + zlib.compress(b"x" * 4096), b"Exif\0\0II*\0\x08\0\0\0")
                chunks[place:place] = [(draw(_PNG_KINDS), one_of(draw, packed))]
            case 1 | 2 if kind in (b"IDAT", b"fdAT"):
                try:
                    rows = zlib.decompress(content)
                except zlib.error:
                    rows = content
                chunks[place] = (kind, zlib.compress(mutated_bytes()(draw, rows)))
            case _:
                chunks[place] = (kind, _as_piece(draw, content))
    return signature + b"".join(chunk(kind, content) for kind, content in chunks)


def mutated_jpeg(draw: DrawFn, data: bytes) -> bytes:
    """Change, move, duplicate and remove segments, with correct lengths; change scans as bytes."""
    segments, at = [], 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        segments.append((data[at + 1], data[at + 4 : end]))
        at = end
    scan = data[at:]
    if not segments or one_in(draw, 3):
        return data[:at] + _as_scan(draw, scan)
    place = draw(integers(0, len(segments) - 1))
    marker, content = segments[place]
    if not _moved(draw, segments, place):
        if one_in(draw, 4):
            segments[place] = (draw(_JPEG_MARKERS), content)
        else:
            segments[place] = (marker, _as_piece(draw, content)[:65533])
    heads = (bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content for marker, content in segments)
    return data[:2] + b"".join(heads) + scan


_TAR_FIELDS = sampled_from(((0, 100), (100, 8), (124, 12), (124, 12), (156, 1), (156, 1), (157, 100), (345, 155)))
_TAR_VALUES = binary(max_size=8) | sampled_from(
    (
        *(b"77777777777", b"-1", b"", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"00000000001"),
        *(b"x", b"L", b"S", b"g", b"1", b"2", b"5", b"../../a.png", b"a.png", b"\xff\xfe.png", b".hidden.png"),
    )
)


def mutated_tar(draw: DrawFn, data: bytes) -> bytes:
    """Change header blocks, with correct checksums; move, duplicate and remove blocks. A gzip file stays gzip."""
    if data.startswith(b"\x1f\x8b") and not one_in(draw, 5):
        try:
            return gzip.compress(mutated_tar(draw, gzip.decompress(data)), mtime=0)
        except (OSError, EOFError, zlib.error):
            return mutated_bytes()(draw, data)
    if one_in(draw, 7):
        return mutated_bytes()(draw, data)
    size = tarfile.BLOCKSIZE
    blocks = [data[at : at + size] for at in range(0, len(data), size)] or [b""]
    headers = [at for at, block in enumerate(blocks) if block[257:262] == b"ustar"] or [0]
    at = one_of(draw, headers)
    if not _moved(draw, blocks, at):
        if one_in(draw, 4):
            other = draw(integers(0, len(blocks) - 1))
            blocks[other] = _as_piece(draw, blocks[other])[:size].ljust(size, b"\0")
        else:
            block = bytearray(blocks[at].ljust(size, b"\0"))
            start, width = draw(_TAR_FIELDS)
            block[start : start + width] = draw(_TAR_VALUES)[:width].ljust(width, b"\0")
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
            blocks[at] = bytes(block)
    return b"".join(blocks)
