"""Reads GGUF files: keys as plain values, tensors as views of the mapped file, blocks of weights as float32.

Format: ggml's `gguf.md`, versions 2 and 3, little-endian. Every count, length and offset is compared with the file's
size before it is used; the reader of the package `gguf` trusts them. That package computes the values of blocks.
"""

import functools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import damaged, require_file
from llama_adapter.runtime.tensor_files.gguf_names import gguf_parts
from llama_adapter.runtime.text import shown_excerpt, shown_name

if TYPE_CHECKING:  # tokenizers are read without torch
    import torch
    from torch import Tensor

_MAX_TENSORS: Final = 100_000
_MAX_DIMENSIONS: Final = 4
_PIECE: Final = 1 << 17  # numbers that are computed together: they fit a processor's cache
_NUMBERS: Final = {  # type of a value -> numpy's
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
}
_TEXT, _ARRAY = 8, 9
_PLAIN: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}  # torch's names
_NEWER: Final = "install a newer `gguf`, or fetch the model in another quantisation, such as Q4_K_M or Q8_0"


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix of quantised weights (rows, columns). `data` holds the bytes of its blocks, which run along a row."""

    data: "Tensor"  # uint8 (rows, bytes of a row), a view of the file
    kind: str  # ggml's name of the blocks' type, such as Q4_K
    shape: tuple[int, ...]

    @property
    def dtype(self) -> "torch.dtype":
        """Of the values."""
        import torch

        return torch.float32

    def narrow(self, axis: int, start: int, length: int) -> "Blocks | Tensor":
        """A range of rows (axis 0) as blocks, or of columns (axis 1) as values."""
        if axis:
            return self.read().narrow(axis, start, length)
        return Blocks(self.data.narrow(0, start, length), self.kind, (length, *self.shape[1:]))

    def data_ptr(self) -> int:
        """The address of the bytes, as that of a tensor."""
        return self.data.data_ptr()

    def read(self) -> "Tensor":
        """The values, float32. Beside the result, memory holds a few megabytes."""
        import torch
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType[self.kind]
        numbers, size = GGML_QUANT_SIZES[kind]
        count = max(1, _PIECE // numbers)
        data, values = self.data.numpy().reshape(-1), np.empty(math.prod(self.shape), np.float32)
        with np.errstate(all="ignore"):  # a scale may be infinite; the decoder's own checks find that
            for first in range(0, len(data) // size, count):
                piece = dequantize(data[first * size : (first + count) * size].reshape(1, -1), kind)
                values[first * numbers : first * numbers + piece.size] = piece[0]
        return torch.from_numpy(values).reshape(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufFile:
    """The content of a GGUF file, or of all files of a split one."""

    keys: dict[str, Any]  # numbers, texts, arrays of numbers, and lists of texts
    tensors: "dict[str, Tensor | Blocks]"
    paths: tuple[Path, ...]


def only_gguf(folder: Path) -> Path:
    """The GGUF file of a folder; of a split model, its first file. Raises CheckpointError if there are several."""
    found = sorted({gguf_parts(path)[0] for path in folder.glob("*.gguf")})
    if len(found) != 1:
        names = ", ".join(f"`{shown_name(path.name)}`" for path in found[:12])
        raise CheckpointError(f"`{folder}` has {len(found)} GGUF models: {names}", hint="name the file")
    return found[0]


def read_gguf(path: Path) -> GgufFile:
    """Read a GGUF file, or all files of a split one if `path` is one of them.

    Raises CheckpointError for a missing, damaged or foreign file, and for tensors of types that cannot be computed.
    """
    paths = gguf_parts(path)
    if absent := next((part for part in paths if not part.exists()), None):
        hint = "copy the missing file" if len(paths) > 1 else ""
        raise CheckpointError(f"There is no file `{absent}`", hint=hint)
    keys: dict[str, Any] = {}
    tensors: dict[str, Tensor | Blocks] = {}
    for part in paths:
        require_file(part)
        try:
            found = _Reader(part)
        except (_DamagedError, UnicodeDecodeError) as error:
            raise damaged(part, str(error)) from None
        keys = found.keys if part == paths[0] else keys
        if twice := next((name for name in found.tensors if name in tensors), None):
            raise CheckpointError(f"`{part}` repeats the tensor `{shown_excerpt(twice)}` of another file")
        tensors |= found.tensors
    return GgufFile(keys=keys, tensors=tensors, paths=tuple(paths))


class _DamagedError(Exception):
    """The content contradicts itself, or the file's size."""


class _Reader:
    """Reads one file from its first byte to its table of tensors."""

    def __init__(self, path: Path) -> None:
        import torch

        self.path = path
        self._size = path.stat().st_size
        self._at = 0
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as self._bytes:
            if self._take(4) != b"GGUF":
                raise _DamagedError("it does not begin with GGUF")
            version = self._number("<u4")
            if version not in (2, 3):
                problem = f"of version {version}" if version & 0xFFFF else "in big-endian order"
                raise CheckpointError(
                    f"`{path}` is a GGUF file {problem}",
                    hint="files of version 2 and 3 in little-endian order are read; convert the model again",
                )
            num_tensors, num_keys = self._number("<u8"), self._number("<u8")
            if num_tensors > _MAX_TENSORS:
                raise _DamagedError(f"{num_tensors:,} tensors")
            self.keys: dict[str, Any] = {}
            for _ in range(num_keys):
                name = self._text()
                if name in self.keys:
                    raise _DamagedError(f"the key {name} twice")
                self.keys[name] = self._value(self._number("<u4"))
            headers = [self._header() for _ in range(num_tensors)]
        alignment = self.keys.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise _DamagedError("its alignment is no power of two from 8 on")
        self._start = -(-self._at // alignment) * alignment
        self._map: Any = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=self._size)
        self.tensors: dict[str, Tensor | Blocks] = {}
        for name, shape, kind, offset in headers:
            if name in self.tensors or offset % alignment:
                raise _DamagedError(f"the tensor {name} is there twice, or not aligned")
            self.tensors[name] = self._tensor(name, shape, kind, self._start + offset)

    def _take(self, count: int) -> bytes:
        if count > self._size - self._at:
            raise _DamagedError("its keys or its table of tensors end beyond the file")
        self._at += count
        return self._bytes[self._at - count : self._at]

    def _number(self, kind: str) -> Any:
        number_type = np.dtype(kind)
        return np.frombuffer(self._take(number_type.itemsize), number_type)[0].item()

    def _text(self) -> str:
        return self._take(self._number("<u8")).decode()

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise _DamagedError(f"a value of the unknown type {kind}")
        kind, count = self._number("<u4"), self._number("<u8")
        if kind in _NUMBERS:
            number_type = np.dtype(_NUMBERS[kind])
            return np.frombuffer(self._take(count * number_type.itemsize), number_type)
        if kind != _TEXT:
            raise _DamagedError(f"a list of values of type {kind}")
        return self._texts(count)

    def _texts(self, count: int) -> list[str]:
        """As `_text` for many texts, which tokenizers have: a third of the time."""
        content, at, found, unpack = self._bytes, self._at, list[str](), struct.Struct("<Q").unpack_from
        if count > (self._size - at) // 8:
            raise _DamagedError(f"a list of {count:,} texts")
        for _ in range(count):
            start = at + 8
            if start > self._size or (at := start + unpack(content, start - 8)[0]) > self._size:
                raise _DamagedError("a text ends beyond the file")
            found.append(content[start:at].decode())
        self._at = at
        return found

    def _header(self) -> tuple[str, tuple[int, ...], int, int]:
        """A tensor's name, shape, type and offset from the start of all tensors."""
        name, dimensions = self._text(), self._number("<u4")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise _DamagedError(f"{dimensions} dimensions of the tensor {name}")
        shape = tuple(reversed([self._number("<u8") for _ in range(dimensions)]))  # the fastest one comes first
        return name, shape, self._number("<u4"), self._number("<u8")

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, start: int) -> "Tensor | Blocks":
        import torch

        try:
            kind, numbers, size = _layout(number)
        except (ValueError, NotImplementedError):  # an unknown type, or one without a function
            raise CheckpointError(
                f"`{self.path}` has the tensor `{shown_excerpt(name)}` of ggml's type {number}, which the installed "
                "package `gguf` cannot compute",
                hint=_NEWER,
            ) from None
        num_bytes = math.prod(shape) // numbers * size
        if 0 in shape or shape[-1] % numbers or num_bytes > self._size - start:
            raise _DamagedError(f"the tensor {name} ends beyond the file, or within a block")
        data: Tensor = torch.empty(0, dtype=torch.uint8).set_(self._map, start, (num_bytes,), (1,))
        if kind in _PLAIN:
            return data.view(getattr(torch, _PLAIN[kind])).reshape(shape)
        return Blocks(data.reshape(*shape[:-1], -1), kind, shape)


@functools.cache
def _layout(number: int) -> tuple[str, int, int]:
    """The name of a type, the numbers of a block and its bytes. Raises ValueError and NotImplementedError."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(number)
    numbers, size = GGML_QUANT_SIZES[kind]
    if kind.name not in _PLAIN:
        dequantize(np.zeros((1, size), np.uint8), kind)
    return kind.name, numbers, size
