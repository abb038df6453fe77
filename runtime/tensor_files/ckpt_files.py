"""Reads MindSpore's `.ckpt` files, memory-mapped, which are a protobuf of named tensors.

    Checkpoint { repeated Value value = 1; }
    Value { string tag = 1; TensorProto tensor = 2; }
    TensorProto { repeated int64 dims = 1; string tensor_type = 2; bytes tensor_content = 3; }

Tensors above 512 MiB are written in parts, which have the same tag and follow each other. A file may end in a checksum.
"""

import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import damaged, require_file
from llama_adapter.runtime.text import shown_excerpt

_DTYPES: Final = {
    "Float16": torch.float16,
    "BFloat16": torch.bfloat16,
    "Float32": torch.float32,
    "Float64": torch.float64,
    "Int8": torch.int8,
    "UInt8": torch.uint8,
    "Int32": torch.int32,
    "Int64": torch.int64,
    "Bool": torch.bool,
}
_TEXT: Final = "str"  # the type of texts that are stored among the tensors
_CHECKSUM: Final = b"crc_num"
_CHECKSUM_BYTES: Final = len(_CHECKSUM) + 10
_VARINT, _BYTES = 0, 2  # wire types of protobuf


class _Part(NamedTuple):
    """A tensor, or a part of one."""

    name: str
    kind: str
    dims: tuple[int, ...]
    start: int  # offset of its first byte in the file
    end: int


def read_ckpt(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, memory-mapped. Raises CheckpointError for a missing, damaged or foreign file."""
    require_file(path)
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    end = len(memory)
    if end > _CHECKSUM_BYTES and memory[end - _CHECKSUM_BYTES :].startswith(_CHECKSUM):
        end -= _CHECKSUM_BYTES
    parts: dict[str, list[_Part]] = {}
    previous = ""
    try:
        for part in _parts(memory, end):
            if part.name in parts and part.name != previous:
                raise ValueError
            parts.setdefault(part.name, []).append(part)
            previous = part.name
        return {name: _tensor(memory, own) for name, own in parts.items() if own[0].kind != _TEXT}
    except (ValueError, IndexError, UnicodeDecodeError):
        raise damaged(path) from None


def _parts(memory: mmap.mmap, end: int) -> Iterator[_Part]:
    for field, _, start, stop in _fields(memory, 0, end):
        if field != 1:
            raise ValueError
        inside = {number: (first, last) for number, _, first, last in _fields(memory, start, stop)}
        if inside.keys() != {1, 2}:  # 3 is a map tensor, which no LLaMA has
            raise ValueError
        dims: list[int] = []
        kind, content = "", None
        for number, form, first, last in _fields(memory, *inside[2]):
            if number == 1 and form == _VARINT:
                dims.append(first)
            elif number == 1:
                place = first
                while place < last:
                    size, place = _read_varint(memory, place, last)
                    dims.append(size)
            elif number == 2:
                kind = memory[first:last].decode()
            elif number == 3:
                content = first, last
        if content is None:
            raise ValueError
        yield _Part(memory[slice(*inside[1])].decode(), kind, () if dims == [0] else tuple(dims), *content)


def _tensor(memory: mmap.mmap, parts: list[_Part]) -> Tensor:
    first = parts[0]
    if first.kind not in _DTYPES:
        raise CheckpointError(
            f"`{shown_excerpt(first.name)}` has numbers of type {shown_excerpt(first.kind)!r}, which are not read here"
        )
    dtype = _DTYPES[first.kind]
    if any(part[:3] != first[:3] or (part.end - part.start) % dtype.itemsize for part in parts):
        raise ValueError
    num_bytes, most = sum(part.end - part.start for part in parts), math.prod(max(size, 1) for size in first.dims)
    if num_bytes != math.prod(first.dims) * dtype.itemsize or most > len(memory):  # torch cannot count all empty ones
        raise ValueError
    pieces = [
        torch.frombuffer(memory, dtype=dtype, offset=part.start, count=(part.end - part.start) // dtype.itemsize)
        for part in parts
        if part.end > part.start
    ]
    if not pieces:
        return torch.empty(first.dims, dtype=dtype)
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).reshape(first.dims)


def _fields(memory: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Number and wire type of each field, then the start and end of its bytes; for a varint, its value and 0."""
    while start < end:
        key, start = _read_varint(memory, start, end)
        value, start = _read_varint(memory, start, end)
        if key & 7 == _BYTES:
            if value > end - start:
                raise ValueError
            yield key >> 3, _BYTES, start, start + value
            start += value
        elif key & 7 == _VARINT:
            yield key >> 3, _VARINT, value, 0
        else:
            raise ValueError


def _read_varint(memory: mmap.mmap, start: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 63, 7):
        if start >= end:
            raise ValueError
        byte = memory[start]
        start += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, start
    raise ValueError
