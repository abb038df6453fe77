"""The format of prefix files: encoded pictures as safetensors, one row per picture. Needs no torch."""

# P pictures, A adapter layers, N heads, Q queries, H head size, D model width

import json
import math
import os
import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

from llama_adapter.app.pictures.prefixes import FIRST_FILE
from llama_adapter.runtime.atomic_write import atomic_write, sync_folder
from llama_adapter.runtime.errors import LlamaAdapterError
from llama_adapter.runtime.json_object import check_fields, check_mapping, read_object, take_version
from llama_adapter.runtime.schemes import PRECISIONS, Precision
from llama_adapter.runtime.text import UNSAFE_ON_TERMINALS, shown_excerpt, shown_name
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.formats import PictureNote, Transparency

if TYPE_CHECKING:  # a process that reads pictures begins without numpy
    import numpy as np

    from llama_adapter.llm.config import DecoderConfig
    from llama_adapter.vision.card import EncoderCard

Kept = Literal["queries", "keys_values"]  # visual queries alone, or the adapter's keys and values too

_VERSION: Final = 1
_KEY: Final = "llama_adapter_prefixes"
_HINT: Final = "copy the folder again, or encode the pictures again with `llama-adapter encode --overwrite`"
_MAX_HEADER_BYTES: Final = 100_000_000  # the limit of safetensors itself
# Number types in safetensors and numpy. numpy has no bfloat16, whose bits are the upper half of a float32.
_NUMBERS: Final = {"float32": ("F32", "<f4"), "float16": ("F16", "<f2"), "bfloat16": ("BF16", "<u2")}
_FIELDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    **dict.fromkeys(("name", "digest", "dtype", "precision", "exif", "reading", "transparency", "keeps"), str),
    **dict.fromkeys(("vision", "fingerprint"), dict),
    "encoder": (str, type(None)),
}


class PrefixFileError(LlamaAdapterError):
    """A prefix file is damaged, or does not belong to the model."""

    default_hint = _HINT


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """How pictures were encoded: the model's encoder, and all settings that visual queries depend on."""

    name: str  # the model's name, for display
    digest: str  # the model's digest in records; without a language model, the encoder's digest
    vision: VisionConfig
    fingerprint: Mapping[str, str]  # of the encoder's parts, see `runtime.graphs.card`
    dtype: str  # the encoder computed in it, and rows are stored in it
    precision: Precision  # of the encoder's weights
    exif: Literal["upright", "ignore"]
    reading: Literal["exact", "fast"]
    transparency: Transparency
    encoder: str | None  # identity of an exported encoder; None: the model's own weights
    keeps: Kept = "queries"

    def __post_init__(self) -> None:
        for name, known in (
            ("dtype", tuple(_NUMBERS)),
            ("precision", tuple(PRECISIONS)),
            ("exif", ("upright", "ignore")),
            ("reading", ("exact", "fast")),
            ("transparency", get_args(Transparency)),
            ("keeps", get_args(Kept)),
        ):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be {' or '.join(known)}, got {shown_excerpt(repr(value))}")
        if UNSAFE_ON_TERMINALS.search(self.name):
            raise ValueError(f"name must be a text without control characters, got {self.name!r}")

    @property
    def reading_of_pictures(self) -> dict[str, Any]:
        """The fields of a `CaptionerSpec` that say how pictures were read."""
        return {"exif": self.exif, "reading": self.reading, "transparency": self.transparency}

    @property
    def card(self) -> "EncoderCard":
        """The card that an exported encoder of this model would have."""
        from llama_adapter.vision.card import EncoderCard

        return EncoderCard(name=self.name, vision=self.vision, dtype="float32", opset=0, fingerprint=self.fingerprint)

    def to_json(self) -> str:
        """The text that is stored in files."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {"vision": self.vision.to_dict(), "fingerprint": dict(self.fingerprint)}
        return json.dumps({"version": _VERSION, **values}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Encoding":
        """Inverse of `to_json`. Raises ValueError for invalid content and for another version."""
        from llama_adapter.vision.card import read_vision_config

        values = read_object(text)
        take_version(values, _VERSION)
        check_fields(values, _FIELDS, what="the encoding")
        check_mapping(values["fingerprint"], str, what="fingerprint")
        return cls(**{**values, "vision": read_vision_config(values["vision"])})


class StoredPicture(NamedTuple):
    """An encoded picture, in float32, which represents the numbers of every dtype exactly."""

    query_QD: "np.ndarray"
    k_ANQH: "np.ndarray | None" = None  # adapter keys and gated values; None: not projected yet
    v_ANQH: "np.ndarray | None" = None

    @property
    def keys_values(self) -> "tuple[np.ndarray, np.ndarray] | None":
        """Keys and values, or None if they are not stored."""
        return None if self.k_ANQH is None or self.v_ANQH is None else (self.k_ANQH, self.v_ANQH)

    @property
    def tensors(self) -> "dict[str, np.ndarray]":
        """The tensors, by their names in files."""
        named = zip(("queries", "keys", "values"), self, strict=True)
        return {name: tensor for name, tensor in named if tensor is not None}


class Entry(NamedTuple):
    """The picture of a row."""

    digest: str  # SHA-256 of the picture's file, hexadecimal
    name: str  # as in records
    crc32: int  # of the row's bytes


def read_first_file(place: str) -> "PrefixFile":
    """The header of a prefix file, or of the first file of a folder. Raises PrefixFileError."""
    return read_prefix_file(_first_file(place))


def check_keys_values(place: str, config: "DecoderConfig") -> None:
    """Raise PrefixFileError if the keys and values of the first file at `place` do not fit the decoder."""
    wanted = (config.num_adapter_layers, config.all_heads or config.num_heads, config.num_queries, config.head_dim)
    keys = read_first_file(place).rows.get("keys", wanted)
    if keys != wanted:
        raise PrefixFileError(
            f"`{shown_name(_first_file(place))}` holds {_told_keys(keys)}, and this model needs {_told_keys(wanted)}",
            hint="name the model that encoded them, or encode the pictures again with this one",
        )


def _first_file(place: str) -> str:
    return os.path.join(place, FIRST_FILE) if os.path.isdir(place) else place


def _told_keys(shape: tuple[int, ...]) -> str:
    layers, heads, queries, width = shape
    return f"keys and values of {layers} layers, {heads} heads, {queries} queries and head size {width}"


def write_prefixes(path: Path, encoding: Encoding, rows: Sequence[tuple[str, str, StoredPicture]]) -> None:
    """Write pictures, each with its digest and name, to one file, atomically and synced. Raises OSError."""
    stored = [{name: _stored(tensor, encoding.dtype) for name, tensor in row.tensors.items()} for _, _, row in rows]
    entries = [
        Entry(digest, name, _checksum(parts.values())) for (digest, name, _), parts in zip(rows, stored, strict=True)
    ]
    head: dict[str, Any] = {
        "__metadata__": {_KEY: encoding.to_json(), "pictures": json.dumps(entries, separators=(",", ":"))}
    }
    position = 0
    for name, tensor in rows[0][2].tensors.items():
        end = position + sum(len(parts[name]) for parts in stored)
        shape = [len(rows), *tensor.shape]
        head[name] = {"dtype": _NUMBERS[encoding.dtype][0], "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # safetensors aligns data to 8 bytes
    with atomic_write(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in rows[0][2].tensors:
            file.writelines(parts[name] for parts in stored)
    sync_folder(path.parent)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixFile:
    """The header of a prefix file."""

    encoding: Encoding
    entries: tuple[Entry, ...]
    tensors: Mapping[str, tuple[int, tuple[int, ...]]]  # by name: offset in the file, and shape of one row

    @property
    def rows(self) -> dict[str, tuple[int, ...]]:
        """The shape of one row of each tensor, by name."""
        return {name: shape for name, (_, shape) in self.tensors.items()}


def read_prefix_file(path: str | os.PathLike[str]) -> PrefixFile:
    """Read the header of a file. Raises PrefixFileError for a missing or damaged file, or one of another format."""
    shown = shown_name(os.fspath(path))
    try:
        status = os.stat(path)
        return _read_head(os.fspath(path), status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise PrefixFileError(f"The prefix file `{shown}` cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise PrefixFileError(f"`{shown}` is no prefix file, or damaged: {error}") from None


@lru_cache(maxsize=64)
def _read_head(path: str, num_bytes: int, changed_ns: int) -> PrefixFile:
    """Read and check a header. Raises ValueError and OSError. `changed_ns` is part of the cache key only."""
    with open(path, "rb") as file:
        beginning = file.read(8)
        length = struct.unpack("<Q", beginning)[0] if len(beginning) == 8 else 0
        if not 2 <= length <= min(num_bytes - 8, _MAX_HEADER_BYTES):
            raise ValueError("it has no head of safetensors")
        head = read_object(file.read(length).decode())
    metadata = head.pop("__metadata__", None)
    if type(metadata) is not dict or type(metadata.get(_KEY)) is not str or type(metadata.get("pictures")) is not str:
        raise ValueError("it holds other tensors")
    encoding = Encoding.from_json(metadata[_KEY])
    entries = _read_entries(metadata["pictures"])
    wanted = ("queries",) if encoding.keeps == "queries" else ("queries", "keys", "values")
    if tuple(head) != wanted:
        raise ValueError(f"its tensors are {', '.join(map(shown_excerpt, head))}, where {', '.join(wanted)} are wanted")
    kind, number = _NUMBERS[encoding.dtype]
    tensors, end = {}, 0
    for name, form in head.items():
        check_fields(form, {"dtype": str, "shape": list, "data_offsets": list}, what=name)
        count, *row = shape = form["shape"] or [0]
        if form["dtype"] != kind:
            raise ValueError(f"{name} has the dtype {shown_excerpt(form['dtype'])}, where {kind} is wanted")
        if count != len(entries) or any(type(size) is not int or size < 1 for size in shape):
            raise ValueError(f"{name} has the shape {shape}, and {len(entries)} pictures are listed")
        start, end = end, end + math.prod(shape) * int(number[-1])
        if form["data_offsets"] != [start, end]:
            raise ValueError(f"{name} of shape {shape} lies at {form['data_offsets']}, not at {[start, end]}")
        tensors[name] = (8 + length + start, tuple(row))
    prefixes = PrefixFile(encoding=encoding, entries=entries, tensors=tensors)
    _check_shapes(prefixes.rows, encoding)
    if 8 + length + end != num_bytes:
        raise ValueError(f"it has {num_bytes:,} bytes, where {8 + length + end:,} are wanted")
    return prefixes


def _check_shapes(rows: Mapping[str, tuple[int, ...]], encoding: Encoding) -> None:
    query = encoding.card.output_shape
    if rows["queries"] != query:
        raise ValueError(f"its visual queries are {rows['queries']}, where {query} is wanted")
    if "keys" not in rows:
        return
    keys = rows["keys"]
    if rows["values"] != keys or len(keys) != 4 or keys[2] != query[0] or keys[1] * keys[3] != query[1]:
        raise ValueError(f"its keys {keys} and values {rows['values']} do not go with visual queries {query}")


def _read_entries(text: str) -> tuple[Entry, ...]:
    with suppress(ValueError, RecursionError, TypeError):
        entries = tuple(Entry(*one) for one in json.loads(text))
        if entries and all(map(_is_entry, entries)):
            return entries
    raise ValueError("its list of pictures is empty or damaged")


def _is_entry(entry: Entry) -> bool:
    has_kinds = [type(part) for part in entry] == [str, str, int]
    return has_kinds and re.fullmatch("[0-9a-f]{64}", entry.digest) is not None


@dataclass(frozen=True, slots=True)
class PrefixRow:
    """One encoded picture in a prefix file. Readers take it as a source, like a picture."""

    path: str
    row: int
    digest: str  # of the picture
    notes: tuple[PictureNote, ...] = ()

    def read(self, wanted: PrefixFile) -> StoredPicture:
        """Read the row.

        Raises PictureError if it cannot be read, is damaged, has numbers that are not finite, or if its file has
        another encoding or other shapes than `wanted`.
        """
        shown = f"`{shown_name(self.path)}`"
        try:
            file = read_prefix_file(self.path)
            if file.encoding != wanted.encoding:
                raise PictureError("unsupported", f"{shown} {differences(file.encoding, wanted.encoding)}.")
            if file.rows != wanted.rows:
                keys, others = _told_keys(file.rows["keys"]), _told_keys(wanted.rows["keys"])
                raise PictureError("unsupported", f"{shown} holds {keys}, and {others} are wanted; {_HINT}.")
            if self.row >= len(file.entries) or file.entries[self.row].digest != self.digest:
                raise PictureError("truncated", f"Row {self.row} of {shown} does not hold this picture; {_HINT}.")
            with open(self.path, "rb") as opened:
                parts = {name: self._part(opened.fileno(), file, name) for name in file.tensors}
        except PrefixFileError as error:
            is_there = os.path.exists(self.path)
            raise PictureError("unreadable" if is_there else "missing", f"{error.message}; {error.hint}.") from None
        except OSError as error:
            raise PictureError("unreadable", f"Wanted an encoded picture in {shown}: {error.strerror}.") from None
        if _checksum(parts.values()) != file.entries[self.row].crc32:
            raise PictureError("truncated", f"Row {self.row} of {shown} is damaged; {_HINT}.")
        tensors = {name: _numbers(parts[name], file.encoding.dtype, shape) for name, shape in file.rows.items()}
        if any(not abs(tensor).max(initial=0) < math.inf for tensor in tensors.values()):
            message = f"Row {self.row} of {shown} has numbers that are not finite; encode this picture in float32."
            raise PictureError("unsupported", message)
        return StoredPicture(tensors["queries"], tensors.get("keys"), tensors.get("values"))

    def _part(self, descriptor: int, file: PrefixFile, name: str) -> bytes:
        offset, shape = file.tensors[name]
        num_bytes = math.prod(shape) * int(_NUMBERS[file.encoding.dtype][1][-1])
        return os.pread(descriptor, num_bytes, offset + self.row * num_bytes)


def differences(one: Encoding, other: Encoding) -> str:
    """How an encoding differs from another, as a part of a sentence that begins with `holds prefixes of`."""
    if one.digest != other.digest:
        return (
            f"holds prefixes of the model {one.name} ({one.digest[:12]}), and those of {other.name} "
            f"({other.digest[:12]}) are wanted"
        )
    names = [field.name for field in fields(one) if getattr(one, field.name) != getattr(other, field.name)]
    told = (f"{name} {getattr(one, name)}" for name in names if name not in ("vision", "fingerprint"))
    wanted = (f"{name} {getattr(other, name)}" for name in names if name not in ("vision", "fingerprint"))
    return f"holds prefixes of {one.name} with {', '.join(told)}, and those with {', '.join(wanted)} are wanted"


def _stored(numbers: "np.ndarray", dtype: str) -> bytes:
    import numpy as np

    numbers = np.ascontiguousarray(numbers, dtype=np.float32)
    if dtype == "bfloat16":
        return (numbers.view("<u4") >> 16).astype("<u2").tobytes()
    return numbers.astype(_NUMBERS[dtype][1]).tobytes()


def _numbers(data: bytes, dtype: str, shape: tuple[int, ...]) -> "np.ndarray":
    import numpy as np

    stored = np.frombuffer(data, dtype=_NUMBERS[dtype][1]).reshape(shape)
    if dtype == "bfloat16":
        return (stored.astype("<u4") << 16).view("<f4").astype(np.float32)
    return stored.astype(np.float32)


def _checksum(parts: Iterable[bytes]) -> int:
    return zlib.crc32(b"".join(parts))
