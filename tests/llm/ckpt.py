"""Writes `.ckpt` files as MindSpore does. `runtime/tensor_files/ckpt_files.py` describes them."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.tensor_files.ckpt_files import _DTYPES

_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_VARINT, _BYTES = 0, 2  # wire types of protobuf


def write_ckpt(path: Path, tensors: Iterable[tuple[str, Tensor]], *, part_bytes: int = 512 << 20) -> None:
    """Write tensors, those with more bytes in parts."""
    with atomic_write(path) as file:  # the tensors may be mapped from a file that is replaced
        for name, tensor in tensors:
            content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            dims = b"".join(_field(1, _VARINT) + _varint(size) for size in tensor.shape or (0,))
            kind = _with_length(2, _NAMES[tensor.dtype].encode())
            for start in range(0, max(len(content), 1), part_bytes):
                numbers = dims + kind + _with_length(3, content[start : start + part_bytes])
                file.write(_with_length(1, _with_length(1, name.encode()) + _with_length(2, numbers)))


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _field(number: int, kind: int) -> bytes:
    return bytes([number << 3 | kind])


def _with_length(number: int, content: bytes) -> bytes:
    return _field(number, _BYTES) + _varint(len(content)) + content
