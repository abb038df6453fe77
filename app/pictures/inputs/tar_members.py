"""The members of a tar archive, in order and in bounded memory. Nothing is extracted.

Formats: POSIX.1-2001 (pax) and GNU tar. The standard library's reader mistakes a damaged header for the end of the
archive, and reads headers of any size. Therefore only its parser of a single header is used.
"""

import bz2
import gzip
import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, Protocol

_BLOCK: Final = tarfile.BLOCKSIZE
_MAX_HEADER_BYTES: Final = 2**20  # limit for long names and pax headers
_CHUNK_BYTES: Final = 2**16
_LONG_NAME, _LONG_LINK = tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK
_PAX_TYPES: Final = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_EXTENSION_TYPES: Final = (*_PAX_TYPES, _LONG_NAME, _LONG_LINK, tarfile.XGLTYPE)
_PAX_SIZE: Final = re.compile("[0-9]{1,20}")  # int() refuses very long numbers
_WITHOUT_DATA: Final = (
    *(tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE),
    *(tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TarMember:
    """One member. Its bytes begin at `offset` in the uncompressed archive."""

    name: str  # undecodable bytes as surrogates
    kind: Literal["file", "folder", "sparse", "other"]  # other: links, devices and pipes
    num_bytes: int
    offset: int
    header: int  # CRC-32 of the header block before `offset`, to recognise the member


class _Bytes(Protocol):
    def read(self, size: int, /) -> bytes: ...
    def seek(self, offset: int, /) -> int: ...


class TarReader:
    """Reads an archive once. `file` gives its uncompressed bytes. If `num_bytes` is given, `file` must be seekable."""

    def __init__(self, file: _Bytes, *, num_bytes: int | None = None) -> None:
        self._file, self._num_bytes = file, num_bytes
        self._position = 0
        self._header = b""  # the last header block

    @property
    def is_plain(self) -> bool:
        """Whether the archive is not compressed."""
        return self._num_bytes is not None

    def members(self) -> Iterator[TarMember]:
        """All members in order; `read` returns the bytes of the latest one.

        Concatenated archives are read as one. Raises tarfile.ReadError, which gives the reason, if the archive is
        damaged or truncated, and the errors of the file.
        """
        long_name, pax = "", dict[str, str]()
        while (header := self._next_header()) is not None:
            if header.type in _EXTENSION_TYPES:
                data = self._extension(header)
                if header.type == _LONG_NAME:
                    long_name = _text(data.partition(b"\0")[0])
                elif header.type in _PAX_TYPES:
                    pax = _pax_values(data)
                continue
            member = self._member(header, name=long_name, pax=pax)
            long_name, pax = "", {}
            yield member
            size = 0 if header.type in _WITHOUT_DATA else member.num_bytes
            self._move_to(member.offset + _whole_blocks(size))

    def read(self, member: TarMember) -> bytes:
        """The bytes of the latest member. Raises the errors of `members`."""
        self._move_to(member.offset)
        return self._take(member.num_bytes)

    def _next_header(self) -> tarfile.TarInfo | None:
        has_ended = False
        while True:
            block = self._file.read(_BLOCK)
            self._position += len(block)
            if has_ended and len(block) < _BLOCK:
                return None
            if not block:
                raise tarfile.ReadError("it ends without the zeros that close an archive")
            if len(block) < _BLOCK:
                raise tarfile.ReadError("it ends in the middle of a header")
            if not any(block):
                has_ended = True
                continue
            try:
                header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            except tarfile.HeaderError:
                if has_ended:  # bytes after the end are not part of the archive
                    return None
                raise tarfile.ReadError(f"there is no header at byte {self._position - _BLOCK:,}") from None
            if header.type == tarfile.GNUTYPE_SPARSE:
                self._skip_sparse_map(block)
            self._header = block
            return header

    def _member(self, header: tarfile.TarInfo, *, name: str, pax: dict[str, str]) -> TarMember:
        size = header.size
        if "size" in pax:
            size = int(pax["size"]) if _PAX_SIZE.fullmatch(pax["size"]) else -1
        if size < 0:
            raise tarfile.ReadError(f"a size in the header before byte {self._position:,} is invalid")
        kind: Literal["file", "folder", "sparse", "other"] = "other"
        if header.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse.") for key in pax):
            kind = "sparse"
        elif header.type in tarfile.REGULAR_TYPES:
            kind = "file"
        elif header.type == tarfile.DIRTYPE:
            kind = "folder"
        if header.type not in _WITHOUT_DATA and self._num_bytes is not None and self._position + size > self._num_bytes:
            raise tarfile.ReadError("it ends in the middle of a member")
        name = pax.get("GNU.sparse.name") or pax.get("path") or name or header.name
        return TarMember(name=name, kind=kind, num_bytes=size, offset=self._position, header=zlib.crc32(self._header))

    def _extension(self, header: tarfile.TarInfo) -> bytes:
        if not 0 <= header.size <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header before byte {self._position:,} says that it has {header.size:,} bytes")
        return self._take(_whole_blocks(header.size))[: header.size]

    def _skip_sparse_map(self, block: bytes) -> None:
        """Skip the extension blocks of the sparse map of an old GNU sparse member."""
        continues_at = 482
        while block[continues_at]:
            block, continues_at = self._take(_BLOCK), 504

    def _take(self, num_bytes: int) -> bytes:
        data = self._file.read(num_bytes)
        self._position += len(data)
        if len(data) < num_bytes:
            raise tarfile.ReadError("it ends in the middle of a member")
        return data

    def _move_to(self, position: int) -> None:
        if self._num_bytes is not None:
            self._file.seek(position)
            self._position = position
            return
        while self._position < position:
            self._take(min(_CHUNK_BYTES, position - self._position))


@contextmanager
def opened_tar(path: str) -> Iterator[TarReader]:
    """Open an archive. gzip, bzip2 and xz are recognised by their first bytes and decompressed.

    Raises OSError, and tarfile.CompressionError for Zstandard.
    """
    with open(path, "rb") as file:
        magic = file.peek(6)
        if magic.startswith(b"\x28\xb5\x2f\xfd"):
            raise tarfile.CompressionError("it is compressed with Zstandard; unpack it with `zstd -d` first.")
        if magic.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield TarReader(unpacked)
        elif magic.startswith(b"BZh"):
            with bz2.BZ2File(file) as unpacked:
                yield TarReader(unpacked)
        elif magic.startswith(b"\xfd7zXZ\0"):
            with lzma.LZMAFile(file) as unpacked:
                yield TarReader(unpacked)
        else:
            yield TarReader(file, num_bytes=os.fstat(file.fileno()).st_size)


def _whole_blocks(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK) * _BLOCK


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def _pax_values(data: bytes) -> dict[str, str]:
    """The records of a pax header, which are lines of `LENGTH KEY=VALUE`. Raises tarfile.ReadError."""
    values: dict[str, str] = {}
    data, start = data.rstrip(b"\0"), 0
    while start < len(data):
        length, _, _ = data[start : start + 20].partition(b" ")
        record = data[start : start + int(length)] if length.isdigit() else b""
        key, equals, value = record[len(length) + 1 :].partition(b"=")
        if not equals or not value.endswith(b"\n") or len(record) != int(length):
            raise tarfile.ReadError("a pax header in it is invalid")
        values[_text(key)] = _text(value[:-1])
        start += len(record)
    return values
