"""Seeded mutations for formats: bytes, JSON, lines, zips, safetensors, PNG, JPEG and tar.

Each mutator takes an input and a random generator, and returns another input. It changes the content inside the
container. Most of the time it corrects checksums and lengths afterwards; otherwise nearly every mutation would fail at
the first check.
"""

import copy
import gzip
import io
import json
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from tests.bad_files import chunk
from tests.fuzz.target import Mutator

_NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)
_MOST_PLACES = 5_000
_RAW = "@raw:"  # marks values that the json module cannot write; they are replaced in the text
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**30),
    *("", " ", "a", "0", "\0", "\n", "\x1b[31m", "\u202e", "\ud800", "é", "😀", "x" * 300, "../..", "/etc/passwd"),
    *([], {}, [[]], [None], {"": None}, {"path": "/etc/passwd"}, {"type": "text"}),
    *(f"{_RAW}{text}@" for text in ("NaN", "-Infinity", "1e999", "9" * 400, "9" * 5_000, "1.0", "[" * 2_000)),
)


def words(text: str) -> list[str]:
    """The words of a text, used as tokens by a mutator."""
    return text.split()


def mutated_bytes(*tokens: bytes, most: int = 4) -> Mutator:
    """Flip bits, and remove, duplicate, move and insert pieces; `tokens` are pieces with a meaning in the format."""

    def mutate(data: bytes, random: Random) -> bytes:
        content = bytearray(data)
        for _ in range(random.randint(1, most)):
            _change(content, random, tokens)
        return bytes(content)

    return mutate


def _change(content: bytearray, random: Random, tokens: Sequence[bytes]) -> None:
    size = len(content)
    at = random.randrange(size + 1)
    length = min(size - at, random.choice((1, 2, 4, 8, 16, 64, 256, 4096)))
    match random.randrange(10 if tokens else 8):
        case 0 if at < size:
            content[at] ^= 1 << random.randrange(8)
        case 1 if at < size:
            content[at] = random.choice((0, 1, 0x0A, 0x20, 0x22, 0x7F, 0x80, 0xFF, random.randrange(256)))
        case 2:
            del content[at : at + length]
        case 3:
            content[at:at] = content[at : at + length] * random.choice((1, 1, 2, 16))
        case 4:
            del content[at:]
        case 5:
            width, order = random.choice((1, 2, 4, 8)), random.choice(("little", "big"))
            number = random.choice(_NUMBERS) & (256**width - 1)
            content[at : at + width] = number.to_bytes(width, order)  # type: ignore[arg-type]
        case 6:
            other = random.randrange(size + 1)
            content[at : at + length] = content[other : other + length]
        case 7:
            content[at:at] = random.randbytes(random.choice((1, 2, 8)))
        case 8:
            content[at:at] = random.choice(tokens)
        case 9:
            content[at : at + length] = random.choice(tokens)
        case _:
            content[at:at] = b"\0"


def flipped(data: bytes, random: Random) -> bytes:
    """Flip bits or set bytes, one to three times, so that all lengths stay correct."""
    content = bytearray(data)
    for _ in range(random.randint(1, 3)):
        if content:
            at = random.randrange(len(content))
            content[at] = random.choice((content[at] ^ 1 << random.randrange(8), 0, 1, 0x7F, 0xFF))
    return bytes(content)


def either(*mutators: Mutator) -> Mutator:
    """Use one of these mutators each time; a mutator that is given twice is used more often."""
    return lambda data, random: random.choice(mutators)(data, random)


# JSON


def mutated_json(*words: Any) -> Mutator:
    """Replace, remove, duplicate, move and nest values; `words` are keys and values with a meaning in the format."""
    as_bytes = mutated_bytes(b'"', b",", b"{", b"}", b"[", b"]", b"\\", b"\\ud800", b"null", b"NaN", b"\xef\xbb\xbf")

    def mutate(data: bytes, random: Random) -> bytes:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return as_bytes(data, random)
        try:
            for _ in range(random.randint(1, 3)):
                value = _changed_value(value, random, words)
            text = json.dumps(value, ensure_ascii=random.random() < 0.5)
        except (ValueError, OverflowError, RecursionError):
            return as_bytes(data, random)
        while (start := text.find(f'"{_RAW}')) >= 0 and (end := text.find('@"', start)) >= 0:
            text = text[:start] + text[start + 1 + len(_RAW) : end] + text[end + 2 :]
        changed = text.encode(errors="surrogatepass" if random.random() < 0.2 else "backslashreplace")
        return as_bytes(changed, random) if random.random() < 0.15 else changed

    return mutate


def _changed_value(root: Any, random: Random, words: Sequence[Any]) -> Any:
    """Make one change somewhere in a value."""
    holder = [root]
    places: list[tuple[Any, Any]] = []  # the container of each value, and its key in the container
    pending: list[Any] = [holder]
    while pending and len(places) < _MOST_PLACES:
        one = pending.pop()
        keys: Sequence[Any] = list(one) if isinstance(one, dict) else range(len(one))
        for key in keys:
            places.append((one, key))
            if isinstance(one[key], dict | list):
                pending.append(one[key])
    parent, key = random.choice(places)
    if isinstance(parent[key], dict | list) and random.random() < 0.5:  # prefer values inside it
        parent, key = random.choice(places)
    new = copy.deepcopy(random.choice((random.choice(_VALUES), random.choice(words or _VALUES))))
    match random.randrange(9):
        case 0 | 1:
            parent[key] = new
        case 2:
            if parent is not holder:
                del parent[key]
        case 3:
            if isinstance(parent, dict):
                parent[str(random.choice(words or ("", "x", "\0", "__class__")))] = copy.deepcopy(parent[key])
            else:
                parent.insert(key, copy.deepcopy(parent[key]))
        case 4:
            other, its = random.choice(places)
            if not isinstance(other[its], dict | list):  # otherwise a value could contain itself
                parent[key] = other[its]
        case 5:
            parent[key] = [copy.deepcopy(parent[key]) for _ in range(random.choice((1, 2, 40)))]
        case 6:
            parent[key] = {str(random.choice(words or ("x",))): parent[key]}
        case 7 if isinstance(parent[key], str):
            text = parent[key]
            at = random.randrange(len(text) + 1)
            parent[key] = text[:at] + str(new)[:400] + text[at + random.choice((0, 1, 5)) :]
        case 8 if isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
            parent[key] = random.choice((-parent[key], parent[key] + 1, parent[key] * 1000, parent[key] / 2))
        case _:
            parent[key] = new
    return holder[0] if holder else None


# Lines


def mutated_lines(inner: Mutator) -> Mutator:
    """Change lines with `inner`; remove, duplicate, move, join and split them; use line ends of other systems."""

    def mutate(data: bytes, random: Random) -> bytes:
        lines = data.split(b"\n")
        at = random.randrange(len(lines))
        match random.randrange(12):
            case 0 | 1 | 2 | 3:
                lines[at] = inner(lines[at], random)
            case 4:
                del lines[at]
            case 5:
                lines[at:at] = [random.choice(lines)] * random.choice((1, 1, 30))
            case 6:
                random.shuffle(lines)
            case 7:
                return random.choice((b" ", b"", b"\r", b"\r\n", b"\0", b"\n\n")).join(lines)
            case 8:
                lines[at] += random.choice((b"\r", b" ", b"\0", b"#", b",", b"}"))
            case 9:
                lines[at:at] = [random.choice((b"", b" ", b"# x", b"null", b"[]", b"{}", b"\xff"))]
            case 10:
                return data[: random.randrange(len(data) + 1)]
            case _:
                lines[at : at + 2] = [random.choice((b"", b" ", b",")).join(lines[at : at + 2])]
        return b"\n".join(lines)

    return mutate


# Containers


def mutated_zip(inner: Mapping[str, Mutator], *, names: Sequence[str] = ()) -> Mutator:
    """Change entries with the mutator for the end of their name ("" for others); rename, duplicate, remove or compress.

    `names` are names with a meaning in the format.
    """
    as_bytes = mutated_bytes(b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07")

    def mutate(data: bytes, random: Random) -> bytes:
        if random.random() < 0.2:
            return as_bytes(data, random)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
        except Exception:
            return as_bytes(data, random)
        if not entries:
            return as_bytes(data, random)
        at = random.randrange(len(entries))
        name, content = entries[at]
        match random.randrange(8):
            case 0:
                del entries[at]
            case 1:
                entries.append((name, random.choice(entries)[1]))
            case 2:
                entries[at] = (random.choice((*names, name + "x", name[1:], "", "../" + name, "/" + name)), content)
            case 3 if names:
                entries.append((random.choice(names), content))
            case _:
                change = next(mutator for end, mutator in inner.items() if name.endswith(end))
                entries[at] = (name, change(content, random))
        method = zipfile.ZIP_DEFLATED if random.random() < 0.2 else zipfile.ZIP_STORED
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", method) as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about duplicate names
            for name, content in entries:
                entry = zipfile.ZipInfo(name.encode(errors="replace").decode())
                entry.compress_type = method
                if random.random() < 0.02:
                    entry.external_attr = 0o120777 << 16  # a symbolic link
                archive.writestr(entry, content)
        return packed.getvalue()

    return mutate


def mutated_safetensors(header: Mutator) -> Mutator:
    """Change the header as JSON, most of the time with a correct length; cut or extend the data."""
    as_bytes = mutated_bytes()

    def mutate(data: bytes, random: Random) -> bytes:
        length = int.from_bytes(data[:8], "little")
        if random.random() < 0.1 or len(data) < 8 + length:
            return as_bytes(data, random)
        text, numbers = data[8 : 8 + length], data[8 + length :]
        if random.random() < 0.85:
            text = header(text, random)
        else:
            numbers = random.choice((numbers[:-1], numbers + b"\0" * 8, b"", as_bytes(numbers, random)))
        said = len(text) if random.random() < 0.95 else random.choice(_NUMBERS)
        return said.to_bytes(8, "little") + text + numbers

    return mutate


def mutated_metadata(*words: Any) -> Mutator:
    """Mutate a text of a safetensors header's metadata as JSON. The length stays correct."""
    as_json = mutated_json(*words)

    def mutate(data: bytes, random: Random) -> bytes:
        try:
            (size,) = struct.unpack_from("<Q", data)
            header = json.loads(data[8 : 8 + size])
            texts = header["__metadata__"]
            name = random.choice(sorted(texts))
            texts[name] = as_json(texts[name].encode(), random).decode(errors="replace")
            changed = json.dumps(header).encode()
        except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
            return flipped(data, random)
        return struct.pack("<Q", len(changed)) + changed + data[8 + size :]

    return mutate


def mutated_png(data: bytes, random: Random) -> bytes:
    """Change the content of chunks, also inside compressed data; move, duplicate and insert chunks.

    Checksums are correct.
    """
    signature, chunks, at = data[:8], list[tuple[bytes, bytes]](), 8
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    if not chunks:
        return mutated_bytes()(data, random)
    place = random.randrange(len(chunks))
    kind, content = chunks[place]
    match random.randrange(8):
        case 0:
            del chunks[place]
        case 1:
            chunks[place:place] = [random.choice(chunks)] * random.choice((1, 1, 50))
        case 2:
            random.shuffle(chunks)
        case 3:
            name = random.choice(b"tEXt zTXt iTXt iCCP eXIf acTL fcTL PLTE tRNS sRGB".split())
            packed = random.choice((content[:64], b"k\0\0" + zlib.compress(b"x" * 4096), b"Exif\0\0II*\0\x08\0\0\0"))
            chunks[place:place] = [(name, packed)]
        case 4 | 5 if kind in (b"IDAT", b"fdAT"):
            try:
                rows = zlib.decompress(content)
            except zlib.error:
                rows = content
            chunks[place] = (kind, zlib.compress(mutated_bytes()(rows, random)))
        case _:
            chunks[place] = (kind, mutated_bytes(most=2)(content, random))
    return signature + b"".join(chunk(kind, content) for kind, content in chunks)


def mutated_jpeg(data: bytes, random: Random) -> bytes:
    """Change, move, duplicate and remove segments, with correct lengths; change scans as bytes."""
    segments, at = [], 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        segments.append((data[at + 1], data[at + 4 : end]))
        at = end
    scan = data[at:]
    if not segments or random.random() < 0.3:
        return data[:at] + mutated_bytes(b"\xff\xd9", b"\xff\xda", b"\xff\xd0", b"\xff\x00")(scan, random)
    place = random.randrange(len(segments))
    match random.randrange(6):
        case 0:
            del segments[place]
        case 1:
            segments[place:place] = [random.choice(segments)] * random.choice((1, 1, 50))
        case 2:
            marker = random.choice((0xC0, 0xC2, 0xC4, 0xDB, 0xDD, 0xE0, 0xE1, 0xE2, 0xEE, 0xFE, random.randrange(256)))
            segments[place] = (marker, segments[place][1])
        case _:
            marker, content = segments[place]
            segments[place] = (marker, mutated_bytes(most=2)(content, random)[:65533])
    heads = (bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content for marker, content in segments)
    return data[:2] + b"".join(heads) + scan


def mutated_tar(data: bytes, random: Random) -> bytes:
    """Change header blocks, with correct checksums; move, duplicate and remove blocks. A gzip file stays gzip."""
    if data.startswith(b"\x1f\x8b") and random.random() < 0.8:
        try:
            return gzip.compress(mutated_tar(gzip.decompress(data), random), mtime=0)
        except (OSError, EOFError, zlib.error):
            return mutated_bytes()(data, random)
    if random.random() < 0.15:
        return mutated_bytes()(data, random)
    size = tarfile.BLOCKSIZE
    blocks = [data[at : at + size] for at in range(0, len(data), size)] or [b""]
    headers = [at for at, block in enumerate(blocks) if block[257:262] == b"ustar"] or [0]
    at = random.choice(headers)
    match random.randrange(7):
        case 0:
            del blocks[at]
        case 1:
            blocks[at:at] = [random.choice(blocks)] * random.choice((1, 1, 20))
        case 2:
            random.shuffle(blocks)
        case 3:
            other = random.randrange(len(blocks))
            blocks[other] = mutated_bytes(most=2)(blocks[other], random)[:size].ljust(size, b"\0")
        case _:
            block = bytearray(blocks[at].ljust(size, b"\0"))
            start, width = random.choice(
                ((0, 100), (100, 8), (124, 12), (124, 12), (156, 1), (156, 1), (157, 100), (345, 155))
            )
            field = random.choice(
                (
                    *(b"77777777777", b"-1", b"", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"00000000001"),
                    *(b"x", b"L", b"S", b"g", b"1", b"2", b"5"),
                    *(b"../../a.png", b"a.png", b"\xff\xfe.png", b".hidden.png", random.randbytes(8)),
                )
            )
            block[start : start + width] = field[:width].ljust(width, b"\0")
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
            blocks[at] = bytes(block)
    return b"".join(blocks)
