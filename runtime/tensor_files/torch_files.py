"""Reads files of `torch.save` and TorchScript archives: content as plain data, tensors as views of the mapped file.

No code in them is run, and all sizes are compared with the file's size before memory is allocated. Both formats of
`torch.save` are read: today's archive, and the format before torch 1.6.
"""

import struct
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.pickles import (
    MAX_BYTES,
    ForeignObjectError,
    Module,
    PickleError,
    StorageHeader,
    TensorHeader,
    read_pickle,
)
from llama_adapter.runtime.text import shown_excerpt

MAX_TENSORS: Final = 100_000
_MAX_CLAIM: Final = 4  # most bytes of all tensors, in multiples of the file's size; few tensors share their elements
_SMALL: Final = 64 << 20  # bytes that tensors may have in any case
_MAX_NAME: Final = 1000  # most characters of a tensor's name, including the names of its modules
_ZIP: Final = b"PK\x03\x04"
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
_MAGIC: Final = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL: Final = 1001


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of the file."""

    start: int
    end: int


class TorchFile:
    """An opened file of torch. `content` is the saved object, with a TensorHeader for each tensor."""

    def __init__(self, path: Path) -> None:
        """Raises ForeignObjectError for objects that are not plain data, CheckpointError for compressed members and
        another byte order, PickleError for other files, and OSError.
        """
        self.path = path
        self._size = path.stat().st_size
        self.is_torchscript = False
        self._spans: dict[str, _Span] = {}  # of the storages, by key
        self._map: Any = None  # torch gives its storages no types
        self._storages: dict[StorageHeader, torch.UntypedStorage] = {}
        with path.open("rb") as file:
            if file.read(len(_ZIP)) == _ZIP:
                self.content = self._open_archive(file)
            else:
                self.content = self._open_legacy(file)

    def tensors(self, headers: Mapping[str, TensorHeader]) -> dict[str, Tensor]:
        """The tensors with these headers, on the CPU and memory-mapped.

        Raises PickleError for headers that do not fit the file, or whose tensors have many times its size.
        """
        if len(headers) > MAX_TENSORS:
            raise PickleError(f"{len(headers):,} tensors")
        for header in headers.values():
            self._check(header)
        claimed = sum(header.numel * header.storage.dtype.itemsize for header in headers.values())
        # Each storage may have to be copied, and members of an archive may share bytes.
        keys = {(header.storage.dtype, header.storage.key) for header in headers.values()}
        stored = sum(self._spans[key].end - self._spans[key].start for _, key in keys)
        for what, num_bytes in (("tensors", claimed), ("storages", stored)):
            if num_bytes > max(_MAX_CLAIM * self._size, _SMALL):
                raise PickleError(f"{what} of {num_bytes:,} bytes")
        return {name: self._tensor(header) for name, header in headers.items()}

    def _check(self, header: TensorHeader) -> None:
        span = self._spans.get(header.storage.key)
        if span is None:
            raise PickleError(f"no storage {header.storage.key!a}")
        stored = (span.end - span.start) // header.storage.dtype.itemsize
        if header.storage.numel > stored or header.end > stored:
            raise PickleError(f"a tensor beyond its storage {header.storage.key!a}")
        if header.numel > stored:
            raise PickleError(f"a tensor of {header.numel:,} numbers in a storage of {stored:,}")

    def _tensor(self, header: TensorHeader) -> Tensor:
        whole = torch.empty(0, dtype=header.storage.dtype)
        return whole.set_(self._storage(header.storage), header.offset, header.shape, header.stride)

    def _storage(self, header: StorageHeader) -> torch.UntypedStorage:
        known = StorageHeader(header.dtype, header.key, 0)
        if known not in self._storages:
            span = self._spans[header.key]
            storage: Any = self._bytes()[span.start : span.end]  # shares the map
            if span.start % header.dtype.itemsize:
                storage = storage.clone()  # a copy that is aligned
            self._storages[known] = storage
        return self._storages[known]

    def _bytes(self) -> Any:
        """The whole file as a storage, mapped once and privately: writing to it does not change the file."""
        if self._map is None:
            self._map = torch.UntypedStorage.from_file(str(self.path), shared=False, nbytes=self._size)
        return self._map

    def _open_archive(self, file: BinaryIO) -> Any:
        """Open a zip file with uncompressed members: `NAME/data.pkl`, and the storages in `NAME/data/`."""
        try:
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
        except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError, OSError) as error:
            raise PickleError(f"{type(error).__name__}") from None
        folder = members[0].filename.partition("/")[0] if members else ""
        needed = {
            info.filename.removeprefix(f"{folder}/"): info
            for info in members
            if info.filename.startswith((f"{folder}/data", f"{folder}/byteorder", f"{folder}/constants.pkl"))
        }
        self.is_torchscript = "constants.pkl" in needed
        spans = {name: self._span(file, info) for name, info in needed.items()}
        if "data.pkl" not in spans:
            raise PickleError("no data.pkl")
        _check_order(self._read(file, spans["byteorder"]) if "byteorder" in spans else b"little", self.path)
        self._spans = {name.removeprefix("data/"): span for name, span in spans.items() if name.startswith("data/")}
        return read_pickle(self._read(file, spans["data.pkl"]), torchscript=self.is_torchscript).value

    def _span(self, file: BinaryIO, info: zipfile.ZipInfo) -> _Span:
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise CheckpointError(
                f"`{self.path}` is an archive with compressed members (`{shown_excerpt(info.filename)}`), where torch "
                "stores them as they are",
                hint="fetch the original file, or unpack it and pack it again without compression (`zip -0`)",
            )
        file.seek(info.header_offset)
        head = file.read(_LOCAL_HEADER.size)
        if len(head) < _LOCAL_HEADER.size:
            raise PickleError("member beyond the file")
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(head)
        start = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if magic != _ZIP or start + info.file_size > self._size:
            raise PickleError("member beyond the file")
        return _Span(start, start + info.file_size)

    def _open_legacy(self, file: BinaryIO) -> Any:
        """Open the format before torch 1.6.

        It has consecutive pickles (magic number, protocol, system, content, keys of the storages), then the storages.
        The number of its elements precedes each storage.
        """
        file.seek(0)
        head = file.read(MAX_BYTES)
        pickles = [read_pickle(head)]
        if pickles[0].value != _MAGIC:
            raise PickleError("neither an archive nor a file of torch before 1.6")
        for _ in range(4):
            pickles.append(read_pickle(head, start=pickles[-1].end))
        _, protocol, _, content, keys = pickles
        if protocol.value != _LEGACY_PROTOCOL or not isinstance(keys.value, list):
            raise PickleError("another protocol")
        _check_order(b"little", self.path)
        end = keys.end
        for key in keys.value:
            storage = content.storages.get(key) if isinstance(key, str) else None
            if storage is None:
                raise PickleError("a storage without a type")
            file.seek(end)
            start = end + 8
            end = start + int.from_bytes(file.read(8), "little") * storage.dtype.itemsize
            if end > self._size:
                raise PickleError("a storage beyond the file")
            self._spans[storage.key] = _Span(start, end)
        return content.value

    def _read(self, file: BinaryIO, span: _Span) -> bytes:
        if span.end - span.start > MAX_BYTES:
            raise PickleError(f"{span.end - span.start:,} bytes beside its numbers")
        file.seek(span.start)
        return file.read(span.end - span.start)


def _check_order(order: bytes, path: Path) -> None:
    if order != sys.byteorder.encode():
        if order in (b"little", b"big"):
            raise CheckpointError(
                f"`{path}` holds numbers in another byte order than this machine's, {sys.byteorder}-endian",
                hint="save it again as safetensors, or with torch on a machine of this byte order",
            )
        raise PickleError("an unknown byte order")


def module_tensors(module: Module) -> dict[str, TensorHeader]:
    """The tensors of a TorchScript module and of the modules inside it, under the names of its state dict.

    Raises ForeignObjectError for a module with its own serialised form, and PickleError for modules that are nested too
    deeply, have too many attributes in total, or contain each other in a cycle.
    """
    found: dict[str, TensorHeader] = {}
    waiting = [("", module)]
    num_seen = 0
    while waiting:
        prefix, inner = waiting.pop()
        for name, value in inner.attributes.items():
            num_seen += 1
            if type(name) is not str:
                raise ForeignObjectError(inner.name)
            if num_seen > MAX_TENSORS or len(prefix) + len(name) > _MAX_NAME:
                raise PickleError("modules without end")
            if isinstance(value, TensorHeader):
                found[prefix + name] = value
            elif isinstance(value, Module):
                waiting.append((f"{prefix}{name}.", value))
    return found
